"""No update counts for much more than its cohort's others: the norm of its change and its samples are bounded by their medians.

A bound is a number for each update, known before anything is summed, so it needs no more of a cohort than that number: blocks
of columns are bounded each by itself. What is within its bound keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import median_low

import torch

from attune.common.wire.blobs import Readable
from attune.common.wire.checks import squared_norm
from attune.common.wire.files import TensorFile
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab.decoded import Decoded

LEAST = 3  # updates of which there is a median that one of them does not decide
BLOCK = 1 << 18  # numbers at a time, which stay in the cache


def middle(sizes: Iterable[float]) -> float:
    """The median, the lower of the two in the middle: half of a cohort cannot raise it. Of fewer than LEAST 0: no median."""
    listed = list(sizes)
    return median_low(listed) if len(listed) >= LEAST else 0.0


def multiples(norms: Mapping[str, float], multiple: float) -> dict[str, float]:
    """Who is above `multiple` medians, and how many medians that is. A median of 0, or a multiple of 0, bounds nobody."""
    median = middle(norms.values()) if multiple else 0.0
    return {name: norm / median for name, norm in norms.items() if norm > multiple * median} if median > 0 else {}


def factor(medians: float, multiple: float) -> float:
    """With what the change of an update of so many medians, above `multiple`, is multiplied.

    Its norm is brought to what it is too large by below the bound, but not below one median: a little above counts nearly as
    much as the bound, and an extreme as much as a usual update. Nobody gains by being extreme, and a newcomer whose changes are
    large still learns. A bound below one median is the norm for all that is above it.
    """
    return max(min(1.0, multiple), 2 * multiple - medians) / medians


def weights(samples: Mapping[str, float], multiple: float) -> dict[str, float]:
    """What each update weighs: its samples, at most `multiple` medians of those that are not 0."""
    most = multiple * middle(count for count in samples.values() if count > 0) or math.inf
    return {name: min(count, most) for name, count in samples.items()}


def change_norm(update: TensorFile, served: TensorFile | None) -> float:
    """The L2 norm of an update's change from what was served (None: it is the change), over all floating tensors."""
    total = 0.0
    for name, spec in update.manifest.items():
        if DTYPES[spec.dtype].is_floating_point:
            for start, block_N in update.blocks(name, BLOCK):
                wide_N = block_N.double()
                total += squared_norm(wide_N if served is None else wide_N - served.span(name, start, start + len(wide_N)))
    return math.sqrt(total)


class Bounded(Decoded):
    """served + factor * (update - served), tensor by tensor as it is read; integers stay as they are.

    served: None where devices hand in changes.
    """

    def __init__(self, source: Readable, manifest: Manifest, served: TensorFile | None, factor: float) -> None:
        super().__init__(source, manifest)
        self._served, self._factor = served, factor

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        return self._bounded(name, tensor.view(-1), 0).view(tensor.shape)

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        return self._bounded(name, super().span(name, start, end), start)

    def blocks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        for start, block_N in super().blocks(name, count):
            yield start, self._bounded(name, block_N, start)

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        out_N.copy_(self[name].view(-1))

    def _bounded(self, name: str, tensor_N: torch.Tensor, start: int) -> torch.Tensor:
        """Computed in float64: what is to be bounded may be near the end of its own range."""
        if not tensor_N.is_floating_point():
            return tensor_N
        wide_N = tensor_N.double()
        if self._served is None:
            return (wide_N * self._factor).to(tensor_N.dtype)
        served_N = self._served.span(name, start, start + len(wide_N)).double()
        return (served_N + (wide_N - served_N) * self._factor).to(tensor_N.dtype)
