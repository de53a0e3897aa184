"""The device's only door to the network."""
