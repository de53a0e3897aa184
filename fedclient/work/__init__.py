"""Work of a device with tensors: learning, evaluation, and the state between orders."""
