"""What a device does with tensors: learning, evaluation, and the state between orders."""
