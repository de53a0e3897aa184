"""Things to run and to read: the demo, and a federation in a few lines."""
