"""Tensor work of the server: the engine, and the aggregators that make the next state."""
