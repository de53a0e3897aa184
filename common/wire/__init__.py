"""Tensors as bytes: safetensors blobs, written and read tensor by tensor, checked before they are believed."""
