"""Tensors as bytes: safetensors blobs, written and read tensor by tensor, and checked before use."""
