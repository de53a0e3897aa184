"""Examples to run and to read: the demo, and federations in a few lines."""
