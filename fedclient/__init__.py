"""The device: trains on data that never leaves it and keeps what is private."""
