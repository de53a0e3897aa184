"""Built-in architectures, made from a ModelSpec, and the role of each tensor of any architecture."""
