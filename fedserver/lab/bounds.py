"""No update counts for much more than its cohort's others: the norm of its change and its samples are bounded by their medians.

A bound is a number for each update, known before anything is summed, so it needs no more of a cohort than that number: blocks
of columns are bounded each by itself. What is within its bound keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median_low

import torch

from attune.common.exchange.transform import ArrivalContext, Cohort, PartUpdate, RoundContext, Unchanged
from attune.common.wire.lazy import TensorSource, TensorView
from attune.fedserver.lab.checks import NORM, change_norm, measured

LEAST = 3  # updates of which there is a median that one of them does not decide


def middle(sizes: Iterable[float]) -> float:
    """Return the lower median, which half of a cohort cannot raise; 0 for fewer than LEAST."""
    listed = list(sizes)
    return median_low(listed) if len(listed) >= LEAST else 0.0


def multiples(norms: Mapping[str, float], multiple: float) -> dict[str, float]:
    """Return the clients above `multiple` medians, with how many medians that is.

    A median or a multiple of 0 bounds no client.
    """
    median = middle(norms.values()) if multiple else 0.0
    return {name: norm / median for name, norm in norms.items() if norm > multiple * median} if median > 0 else {}


def factor(medians: float, multiple: float) -> float:
    """Return the factor for the delta of an update of so many medians, above `multiple`.

    The norm is reduced below the bound by as much as it was above it, but not below one median. So a little above counts nearly
    as much as the bound, and an extreme as much as a usual update. No client gains by being extreme, and a newcomer with large
    deltas still learns. A bound below one median is the norm for all that is above it.
    """
    return max(min(1.0, multiple), 2 * multiple - medians) / medians


def weights(samples: Mapping[str, float], multiple: float) -> dict[str, float]:
    """Return the weight of each update: its samples, at most `multiple` medians of those that are not 0."""
    most = multiple * middle(count for count in samples.values() if count > 0) or math.inf
    return {name: min(count, most) for name, count in samples.items()}


class SampleBound(Unchanged):
    """No update weighs more than `multiple` median sample counts of its cohort; 0: no bound."""

    name = "sample-bound"

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        weight = weights({update.client: update.weight for update in cohort.updates}, self._multiple)
        return replace(cohort, updates=tuple(replace(update, weight=weight[update.client]) for update in cohort.updates))


class ChangeBound(Unchanged):
    """No change is larger than `multiple` median norms of its cohort, and none above `no_vote` medians counts; 0: neither.

    `said_above`: how many medians a change must have for the operator to hear of it. Clipping meets half of a cohort, round
    after round.
    """

    name = "change-bound"

    def __init__(self, multiple: float, no_vote: float, said_above: float) -> None:
        self._multiple, self._no_vote, self._said_above = multiple, no_vote, said_above

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Take the norm now, while the round waits for others."""
        return measured(update, context) if self._multiple else update

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        if not self._multiple:
            return cohort
        counted = [update for update in cohort.updates if update.weight > 0]
        over = multiples({update.client: self._norm(update, context) for update in counted}, self._multiple)
        without = {name for name, medians in over.items() if context.votes and 0 < self._no_vote < medians}
        context.without_vote |= without
        for name, medians in over.items():
            if medians > self._said_above:
                context.bounded[name] = max(context.bounded.get(name, 0.0), medians)
        kept = [update for update in cohort.updates if update.client not in without]
        return replace(cohort, updates=tuple(self._bounded(update, over, len(without), context) for update in kept))

    def _norm(self, update: PartUpdate, context: RoundContext) -> float:
        """Return the norm that was taken on arrival, or take it now: an older version kept none with the update."""
        if NORM in update.facts:
            return update.facts[NORM]
        return change_norm(update.source, context.before(update.client))

    def _bounded(self, update: PartUpdate, over: Mapping[str, float], absent: int, context: RoundContext) -> PartUpdate:
        if update.client not in over:
            return replace(update, absent=absent)
        bounded = Bounded(update.source, context.before(update.client), factor(over[update.client], self._multiple))
        return replace(update, tensors=bounded, absent=absent)


class Bounded(TensorView):
    """served + factor * (update - served), tensor by tensor as it is read; integers stay as they are.

    served: None where devices hand in changes.
    """

    def __init__(self, source: TensorSource, served: TensorSource | None, factor: float) -> None:
        super().__init__(source)
        self._served, self._factor = served, factor

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        """Return the bounded values, computed in float64: what is to be bounded may be near the end of its own range."""
        if not piece_N.is_floating_point():
            return piece_N
        wide_N = piece_N.double()
        if self._served is None:
            return (wide_N * self._factor).to(piece_N.dtype)
        served_N = self._served.span(name, start, start + len(wide_N)).double()
        return (served_N + (wide_N - served_N) * self._factor).to(piece_N.dtype)
