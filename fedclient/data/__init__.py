"""A device's data: reading shards, preparing tensors, and cutting a data set into shards to try things out."""
