"""Many devices' models computed together: their tensors stacked, their samples padded, one operation for all of them."""
