"""What joins other libraries' training loops to a federation: a callback for each, given the context of `train`."""
