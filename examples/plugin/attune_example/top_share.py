"""Sparse updates: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017."""

from __future__ import annotations

import math

import msgspec
import torch

from attune.plugin import DeviceContext, PartUpdate, Unchanged
from attune_example.settings import TopShareSettings


class TopShare(Unchanged):
    """Each tensor's largest changes alone are handed in; the device adds what was left out to its next update."""

    def __init__(self, name: str, settings: TopShareSettings) -> None:
        self.name, self._share = name, settings.share

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        """Return the update with a share of its changes. Tensors of integers stay as they are."""
        sparse = {}
        for name, tensor in update.tensors.items():
            before = torch.zeros_like(tensor) if context.change or context.before is None else context.before[name]
            if not tensor.is_floating_point():
                sparse[name] = tensor
                continue
            change = tensor - before
            if name in context.owed:
                change = change + context.owed[name]
            kept = math.ceil(self._share * change.numel())
            places = change.abs().reshape(-1).topk(kept).indices
            largest = torch.zeros_like(change).reshape(-1)
            largest[places] = change.reshape(-1)[places]
            largest = largest.view(change.shape)
            context.errors[name] = change - largest
            sparse[name] = before + largest
        return msgspec.structs.replace(update, tensors=sparse)
