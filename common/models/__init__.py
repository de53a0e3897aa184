"""Architectures by name, built from a ModelSpec, and what the parts of any architecture are for."""
