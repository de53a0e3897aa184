"""What works on tensors: the engine, and the aggregators that make the next state."""
