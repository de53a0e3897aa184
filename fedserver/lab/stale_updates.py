"""Updates of buffered rounds, whose training may have begun from an older state, as aggregators take them."""

from __future__ import annotations

from dataclasses import replace

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import Returns
from attune.common.wire.tensors import TensorSource, TensorView
from attune.fedserver.lab.checks import BoundedTensors


def weighed(update: PartUpdate, fresh: float, returns: Returns, present: TensorSource | None) -> PartUpdate:
    """Return an update with the weight of its staleness.

    Args:
        update: The update.
        fresh: The weight, from 0 to 1.
        returns: What the part's aggregator takes.
        present: The present values, if devices hand in changes where the aggregator takes values; None: they do not.
    """
    if present is not None:
        return replace(update, tensors=RebasedTensors(update.source, present, fresh))
    if fresh == 1:
        return update
    if returns == "change":
        return replace(update, tensors=BoundedTensors(update.source, None, fresh))
    return replace(update, fresh=fresh)


class RebasedTensors(TensorView):
    """Changes from an older state, as values beside the present one: present + factor * change.

    Args:
        source: The changes.
        present: The present values.
        factor: The weight of their staleness, from 0 to 1.
    """

    def __init__(self, source: TensorSource, present: TensorSource, factor: float) -> None:
        super().__init__(source)
        self._present, self._factor = present, factor

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        """Return the values, computed in float64; integers are rounded."""
        present_N = self._present.span(name, start, start + len(piece_N)).double()
        result_N = present_N.add_(piece_N.double(), alpha=self._factor)
        return (result_N if piece_N.is_floating_point() else result_N.round_()).to(piece_N.dtype)
