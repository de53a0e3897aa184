"""Data of a device: shards are read and checked, and tensors are prepared for the model."""
