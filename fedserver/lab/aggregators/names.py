"""Names of clients among tensors, so that a file of rows names the client of each row."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch


def to_tensor(names: Sequence[str]) -> torch.Tensor:
    """Return names as JSON in bytes: uint8, (length)."""
    return torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8)


def from_tensor(saved: torch.Tensor) -> list[str]:
    """Return the names that `to_tensor` was given."""
    names: list[str] = json.loads(bytes(saved.tolist()))
    return names
