"""How large a model is, before there is one: what somebody else declares decides it."""

from __future__ import annotations

from attune.common.models.registry import build
from attune.common.plan import ModelSpec


def size_bytes(spec: ModelSpec) -> int:
    """Return the bytes of all tensors of a model, without allocating them. Errors are those of `build`."""
    model = build(spec, 0, device="meta")
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
