"""Checks of arriving updates, and their bounds against one another: the transforms that every part of a method has.

On arrival the tensors' names, dtypes, shapes and values are checked while they are read once, and the norm of the change is
taken. Against its cohort an update is bounded by medians, of these norms and of sample counts. A minority of the fleet can be
the majority of one cohort, so the norms are also compared with those that the fleet's devices had in earlier rounds. A bound is
one number for each update, known before anything is summed. An update within its bounds keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median_low

import torch
from msgspec.structs import replace

from attune.common.errors import UpdateRefused
from attune.common.exchange.encodings import AS_THEY_LIE, encoded_manifest
from attune.common.exchange.transform import ArrivalContext, Cohort, PartUpdate, RoundContext, Unchanged, is_sealed
from attune.common.methods.ridge import check_sums
from attune.common.methods.settings.aggregators import Returns
from attune.common.task import TaskName
from attune.common.wire.header import check_manifest
from attune.common.wire.tensors import (
    DTYPES,
    Tensors,
    TensorSource,
    TensorView,
    WatchedTensors,
    check_finite,
    is_finite,
    read_through,
)

VARIANCE = "running_var"  # ends the names of such tensors
NORM = "norm"  # of the change, among the facts of an update
LEAST = 3  # fewest updates whose median one of them alone cannot decide
GROWTH = 3.0  # times the fleet's median norm: a cohort's median above it is not believed
KEPT_NORMS = 200  # devices whose latest norms are remembered
UNKNOWN = 10.0  # largest median of a fleet without a history, in norms of the part's values
STILL, LEAST_STILL = 0.1, 1e-3  # range of the assumed median of a cohort or fleet whose median is 0, in such norms
EXTREME = 10.0  # times the bound: a change above it does not count where the server's step does not shrink with the changes


class ShapeCheck(Unchanged):
    """Check that an update has the names, dtypes and shapes of the part. The dtypes of bf16 are allowed."""

    name = "shapes"

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        if not is_sealed(update.tensors):  # the transform that sealed it has checked it
            allowed = [encoded_manifest(context.manifest, encoding) for encoding in AS_THEY_LIE]
            if update.source.manifest not in allowed:
                check_manifest(update.source.manifest, context.manifest, context.who)
        return update


class FiniteCheck(Unchanged):
    """Check for NaN and infinite numbers, while the update is read; running variances below 0 count as 0."""

    name = "finite"

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        if is_sealed(update.tensors):
            return update
        return replace(update, tensors=_Finite(update.source, context.who))

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        def possible(update: PartUpdate) -> PartUpdate:
            if is_sealed(update.tensors) or context.before(update.client) is None:
                return update  # of sealed ones the sum alone can be read
            return replace(update, tensors=PossibleTensors(update.source))

        if not any(name.endswith(VARIANCE) for name in context.manifest):
            return cohort
        return replace(cohort, updates=tuple(map(possible, cohort.updates)), unheard=tuple(map(possible, cohort.unheard)))


class SumsCheck(Unchanged):
    """Check that samples can have the sums that a device hands in, once all of them were read (closed form)."""

    name = "sums"

    def __init__(self, task: TaskName, sizes: Sequence[int], earlier: Callable[[str], Tensors]) -> None:
        self._classes, self._sizes, self._earlier = task == "classes", sizes, earlier

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        def check() -> None:
            check_sums(dict(update.source), self._sizes, self._classes, context.who, self._earlier(context.client))

        if not is_sealed(update.tensors):  # of sealed ones the sum is checked
            context.at_end.append(check)
        return update


class NormLimit(Unchanged):
    """Limit of the L2 norm of a change. A larger one is refused."""

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
    """Return the update, whose facts get the norm of its change once all of it was read. The norm is taken only once."""
    if NORM in context.facts:
        return update
    context.facts[NORM] = 0.0
    norm = ChangeNorm(update.source, context.before)

    def keep() -> None:
        if not math.isfinite(norm.value):
            raise UpdateRefused(f"{context.who} changes the weights by more than numbers can hold")
        context.facts[NORM] = norm.value

    context.at_end.append(keep)
    return replace(update, tensors=norm)


def change_norm(update: TensorSource, served: TensorSource | None) -> float:
    """Return the L2 norm of an update's change from what was served (None: it is the change), over all floating tensors."""
    norm = ChangeNorm(update, served)
    read_through(norm)
    return norm.value


def values_norm(update: TensorSource, served: TensorSource | None) -> float:
    """Return the L2 norm of the served values; where changes are handed in, or all values are 0, that of as many ones."""
    norm = change_norm(served, None) if served is not None else 0.0
    floating = [spec for spec in update.manifest.values() if DTYPES[spec.dtype].is_floating_point]
    return norm or math.sqrt(sum(math.prod(spec.shape) for spec in floating))


class _Finite(WatchedTensors):
    def __init__(self, source: TensorSource, who: str) -> None:
        super().__init__(source)
        self._who = who

    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        if not is_finite(block_N):
            check_finite(name, self.source[name], self._who)


class PossibleTensors(TensorView):
    """Update whose running variances (BatchNorm) are not below 0: of one number below 0 all scores are no numbers.

    Honest ones may be, by a little, where an encoding rounds them.
    """

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        return piece_N.clamp_min(0) if name.endswith(VARIANCE) and piece_N.is_floating_point() else piece_N


class ChangeNorm(WatchedTensors):
    """Norm of the change from `served`, whose squares are added up in float64, in the order in which the tensors are read."""

    def __init__(self, source: TensorSource, served: TensorSource | None) -> None:
        super().__init__(source)
        self._served, self._square = served, 0.0

    @property
    def value(self) -> float:
        """The L2 norm of the change in all that was read."""
        return math.sqrt(self._square)

    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        if block_N.dtype.is_floating_point:
            change_N = block_N.double()
            if self._served is not None:
                change_N = change_N - self._served.span(name, start, start + block_N.shape[0])
            self._square += float(change_N @ change_N)


def cohort_median(sizes: Iterable[float]) -> float:
    """Return the lower median, which half of a cohort cannot raise. Fewer than LEAST sizes give 0."""
    listed = list(sizes)
    return median_low(listed) if len(listed) >= LEAST else 0.0


def reference_norm(norms: Collection[float], fleet: Iterable[float], size: Callable[[], float]) -> float:
    """Return the norm with which changes are compared: the cohort's median, unless the fleet's history contradicts it.

    Args:
        norms: Norms of the cohort's changes.
        fleet: Norms of the changes that devices handed in before; at most one for each device.
        size: Returns the norm of the part's values, which stands for a history that is missing.
    """
    median, known = cohort_median(norms), list(fleet)
    if usual := cohort_median(known):
        return median if 0 < median <= GROWTH * usual else usual
    if stands_still(norms, known):  # a bound that followed the state's own norm would let one device move it ever faster
        most = min(STILL * size(), max(max(filter(None, known), default=math.inf), LEAST_STILL * size()))
    else:
        most = UNKNOWN * size()
    return median if 0 < median <= most else most


def stands_still(norms: Collection[float], fleet: Collection[float]) -> bool:
    """Return whether most devices change nothing, by what the fleet did before or, without that, by the cohort."""
    if len(fleet) >= LEAST:
        return not cohort_median(fleet)
    return len(norms) >= LEAST and not cohort_median(norms)


def above_bound(norms: Mapping[str, float], multiple: float, reference: float) -> dict[str, float]:
    """Return the clients above `multiple` reference norms, with how many that is. A reference or multiple of 0 bounds none."""
    bounded = multiple > 0 and reference > 0
    return {name: norm / reference for name, norm in norms.items() if norm > multiple * reference} if bounded else {}


def bounding_factor(medians: float, multiple: float) -> float:
    """Return the factor for the delta of an update of so many medians, above `multiple`.

    The norm is reduced below the bound by as much as it was above it, but not below one median. So a little above counts nearly
    as much as the bound, and an extreme as much as a usual update. No client gains by being extreme, and a newcomer with large
    deltas still learns. A bound below one median is the norm for all that is above it.
    """
    return max(min(1.0, multiple), 2 * multiple - medians) / medians


def bounded_weights(samples: Mapping[str, float], multiple: float) -> dict[str, float]:
    """Return the weight of each update: its samples, at most `multiple` medians of those that are not 0."""
    most = multiple * cohort_median(count for count in samples.values() if count > 0) or math.inf
    return {name: min(count, most) for name, count in samples.items()}


class SampleBound(Unchanged):
    """Bound of an update's weight: `multiple` median sample counts of its cohort. A multiple of 0 is no bound."""

    name = "sample-bound"

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        weight = bounded_weights({update.client: update.weight for update in cohort.updates}, self._multiple)
        return replace(cohort, updates=tuple(replace(update, weight=weight[update.client]) for update in cohort.updates))


class ChangeBound(Unchanged):
    """Bound of a change's norm, in median norms of its cohort.

    Args:
        multiple: A larger change is reduced to at most so many medians; 0: no bound.
        no_vote: A change above so many medians does not count; 0: each counts.
        said_above: Changes above so many medians are shown to the operator. (Clipping changes half of a cohort in every round.)
        amplified: Whether the server may make a large step of small changes. Then no bound on a change bounds the step, and a
            change above EXTREME bounds does not count. Where most devices change nothing, no change counts.
    """

    name = "change-bound"

    def __init__(self, multiple: float, no_vote: float, said_above: float, amplified: bool = False) -> None:
        self._multiple, self._no_vote, self._said_above = multiple, no_vote, said_above
        self._amplified = amplified

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Take the norm now, while the round waits for others."""
        return measured(update, context) if self._multiple else update

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        if not self._multiple:
            return cohort
        counted = [update for update in cohort.updates if update.weight > 0]
        norms = {update.client: self._norm(update, context) for update in counted}
        still = stands_still(norms.values(), context.norms.values())
        over = above_bound(norms, self._multiple, self._reference(cohort, norms, context))
        without = {name for name, medians in over.items() if 0 < self._no_vote < medians}
        if self._amplified:
            without |= {name for name, medians in over.items() if medians > EXTREME * self._multiple}
            without |= {name for name, norm in norms.items() if still and norm}
        if not context.votes:
            without = set()
        context.without_vote |= without
        for name, medians in over.items():
            if medians > self._said_above:
                context.bounded[name] = max(context.bounded.get(name, 0.0), medians)
        bounded = [self._bounded(update, over, len(without), context) for update in cohort.updates]
        heard = tuple(update for update in bounded if update.client not in without)
        return replace(cohort, updates=heard, unheard=tuple(update for update in bounded if update.client in without))

    def _reference(self, cohort: Cohort, norms: Mapping[str, float], context: RoundContext) -> float:
        """Return the norm to compare with, and remember these norms for later rounds: each as at most two such norms.

        So a fleet whose changes grow is followed in some rounds, and a minority of it moves the median little. Where most
        devices change nothing, each counts as at most one.
        """
        if not context.votes:
            return cohort_median(norms.values())
        if not norms:
            return 0.0
        first = cohort.updates[0]
        size = partial(values_norm, first.source, context.before(first.client))
        growth = 1 if stands_still(norms.values(), context.norms.values()) else 2
        reference = reference_norm(norms.values(), context.norms.values(), size)
        for name, norm in norms.items():
            context.norms.pop(name, None)
            context.norms[name] = min(norm, growth * reference)
        for name in list(context.norms)[:-KEPT_NORMS]:
            del context.norms[name]
        return reference

    def _norm(self, update: PartUpdate, context: RoundContext) -> float:
        """Return the norm that was taken on arrival, or take it now: an older version kept none with the update."""
        if NORM in update.facts:
            return update.facts[NORM]
        return change_norm(update.source, context.before(update.client))

    def _bounded(self, update: PartUpdate, over: Mapping[str, float], absent: int, context: RoundContext) -> PartUpdate:
        if update.client not in over:
            return replace(update, absent=absent)
        bounded = BoundedTensors(
            update.source, context.before(update.client), bounding_factor(over[update.client], self._multiple)
        )
        return replace(update, tensors=bounded, absent=absent)


class BoundedTensors(TensorView):
    """Update of which the change is reduced as it is read: served + factor * (update - served). Integers stay as they are.

    Args:
        source: The update.
        served: Value that the device was served; None where devices hand in changes.
        factor: Number from 0 to 1.
    """

    def __init__(self, source: TensorSource, served: TensorSource | None, factor: float) -> None:
        super().__init__(source)
        self._served, self._factor = served, factor

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        """Return the reduced values, computed in float64: a large update may be near the end of the range of its dtype."""
        if not piece_N.is_floating_point():
            return piece_N
        wide_N = piece_N.double()
        if self._served is None:
            return (wide_N * self._factor).to(piece_N.dtype)
        served_N = self._served.span(name, start, start + len(wide_N)).double()
        return (served_N + (wide_N - served_N) * self._factor).to(piece_N.dtype)


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
