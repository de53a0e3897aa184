"""Checks of an arriving update: names, dtypes and shapes of its tensors, finite values, and the norm of its change."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attune.common.errors import UpdateRefused
from attune.common.exchange.transform import ArrivalContext, PartUpdate, SealedTensors, Unchanged
from attune.common.wire.checks import check_finite, check_manifest, is_finite, squared_norm
from attune.common.wire.encodings import AS_THEY_LIE, encoded_manifest
from attune.common.wire.lazy import BLOCK, TensorSource, WatchedTensors
from attune.common.wire.tensors import DTYPES

NORM = "norm"  # of the change, among the facts of an update


class ShapeCheck(Unchanged):
    """Refuse tensors of other names, dtypes or shapes than the part has. The dtypes of bf16 are allowed."""

    name = "shapes"

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        if not isinstance(update.tensors, SealedTensors):  # what sealed it has checked it
            allowed = [encoded_manifest(context.manifest, encoding) for encoding in AS_THEY_LIE]
            if update.source.manifest not in allowed:
                check_manifest(update.source.manifest, context.manifest, context.who)
        return update


class FiniteCheck(Unchanged):
    """Refuse an update that has a NaN or an infinite number, while it is read."""

    name = "finite"

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        if isinstance(update.tensors, SealedTensors):
            return update
        return replace(update, tensors=_Finite(update.source, context.who))


class NormLimit(Unchanged):
    """Refuse an update whose change has a larger L2 norm than the server allows."""

    name = "norm-limit"

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        if not context.max_norm:
            return update

        def check() -> None:
            norm = context.facts[NORM]
            if norm > context.max_norm:
                limit = f"the limit is {context.max_norm:.3g}"
                raise UpdateRefused(f"{context.who} changes the weights by a norm of {norm:.3g}; {limit}")

        measured_update = measured(update, context)
        context.at_end.append(check)
        return measured_update


def measured(update: PartUpdate, context: ArrivalContext) -> PartUpdate:
    """Return the update so that the norm of its change is among its facts once all of it was read; taken once."""
    if NORM in context.facts:
        return update
    context.facts[NORM] = 0.0
    norm = ChangeNorm(update.source, context.before)

    def keep() -> None:
        context.facts[NORM] = norm.value

    context.at_end.append(keep)
    return replace(update, tensors=norm)


def change_norm(update: TensorSource, served: TensorSource | None) -> float:
    """Return the L2 norm of an update's change from what was served (None: it is the change), over all floating tensors."""
    norm = ChangeNorm(update, served)
    read_through(norm)
    return norm.value


def read_through(tensors: TensorSource) -> None:
    """Read each tensor once, block by block, so that all who watch have seen it."""
    for name in tensors:
        for _ in tensors.blocks(name, BLOCK):
            pass


class _Finite(WatchedTensors):
    def __init__(self, source: TensorSource, who: str) -> None:
        super().__init__(source)
        self._who = who

    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        if not is_finite(block_N):
            check_finite(name, self.source[name], self._who)


class ChangeNorm(WatchedTensors):
    """Adds up the squares of the change from `served`, in float64, in the order in which the tensors are read."""

    def __init__(self, source: TensorSource, served: TensorSource | None) -> None:
        super().__init__(source)
        self._served, self._square = served, 0.0

    @property
    def value(self) -> float:
        """The L2 norm of the change in all that was read."""
        return math.sqrt(self._square)

    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        if DTYPES[self.manifest[name].dtype].is_floating_point:
            wide_N = block_N.double()
            served_N = 0.0 if self._served is None else self._served.span(name, start, start + len(wide_N))
            self._square += squared_norm(wide_N if self._served is None else wide_N - served_N)
