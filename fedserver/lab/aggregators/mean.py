"""One value for all clients: the weighted mean, a robust rule in its place, or an optimiser's step along the mean change.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm 2
(Adam, Yogi, Adagrad); Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (momentum). delta is the cohort's mean minus x, and eta, beta1, beta2 and tau are settings:

    momentum:  m <- beta1 m + delta                 x <- x + eta m
    the rest:  m <- beta1 m + (1 - beta1) delta     x <- x + eta m / (sqrt(v) + tau)
    Adagrad:   v <- v + delta^2
    Adam:      v <- beta2 v + (1 - beta2) delta^2
    Yogi:      v <- v - (1 - beta2) delta^2 sign(v - delta^2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings, SharedOptimiser
from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab.aggregators import votes
from attune.fedserver.lab.aggregators.base import MadeOfSettings, Tensors, cohort, manifest_in, write
from attune.fedserver.lab.aggregators.votes import gram, stack

VALUE, FIRST, SECOND = "value", "first-moment", "second-moment"  # keys of the vault


def moments(optimiser: SharedOptimiser) -> tuple[str, ...]:
    """Return the vault keys of the optimiser's running tensors."""
    return {"none": (), "momentum": (FIRST,)}.get(optimiser, (FIRST, SECOND))


def manifest_of_moments(known: Manifest) -> Manifest:
    """Return dtype and shape of the running tensors. Integers have none; numbers in half precision have float32."""
    wide = {name: spec for name, spec in known.items() if DTYPES[spec.dtype].is_floating_point}
    half = {name for name, spec in wide.items() if DTYPES[spec.dtype].itemsize < torch.float32.itemsize}
    return {name: TensorSpec("F32", spec.shape) if name in half else spec for name, spec in wide.items()}


def at_start(settings: MeanSettings, initial: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return the running tensors before round 1, by vault key: m = 0 and v = tau^2, the smallest that the paper allows."""
    begin = {FIRST: 0.0, SECOND: settings.shared_adaptivity**2}
    floating = {name: tensor.to(_wide(tensor)) for name, tensor in initial.items() if tensor.is_floating_point()}
    return {
        key: {name: torch.full_like(tensor, begin[key]) for name, tensor in floating.items()}
        for key in moments(settings.shared_optimiser)
    }


def stepped(settings: MeanSettings, state: Tensors, mean: torch.Tensor) -> Tensors:
    """Return the next value of a tensor and of its moments, by vault key. Integers take the cohort's mean.

    Args:
        settings: The optimiser and its numbers.
        state: The present value and moments by vault key.
        mean: The cohort's mean of this tensor.
    """
    value = state[VALUE]
    if not value.is_floating_point():
        return {VALUE: mean}
    x = value.to(_wide(value))
    delta = mean.to(x.dtype) - x
    if settings.shared_optimiser == "momentum":
        first = settings.momentum * state[FIRST] + delta
        return {VALUE: (x + settings.step * first).to(value.dtype), FIRST: first}
    first = settings.momentum * state[FIRST] + (1 - settings.momentum) * delta
    second, square = state[SECOND], delta.square()
    if settings.shared_optimiser == "adagrad":
        second = second + square
    elif settings.shared_optimiser == "adam":
        second = settings.shared_beta2 * second + (1 - settings.shared_beta2) * square
    else:
        second = second - (1 - settings.shared_beta2) * square * torch.sign(second - square)
    x = x + settings.step * first / (second.sqrt() + settings.shared_adaptivity)
    return {VALUE: x.to(value.dtype), FIRST: first, SECOND: second}


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


COLUMNS = 1 << 16  # numbers of a tensor whose rows are sorted at a time


class SharedValue(MadeOfSettings):
    """One value for all clients: the weighted mean of the cohort's, xi <- sum_i (m_i / M) xi_i, M the cohort's total.

    McMahan et al. 2017, Algorithm 1; errata E2. The base of aggregators that make something else of the mean: these override
    `apply`, and list in `keys` the vault keys that they write. Memory: one tensor of one update and its running sum.
    """

    keys: tuple[str, ...] = (VALUE,)  # each has the tensors of the part; devices are served VALUE
    _manifest: Manifest | None = None

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        write(self._vault, VALUE, initial)

    def admit(self, client: str, founder: bool = False) -> None:
        """No-op: a new client is served what all are."""

    def slot(self, client: str) -> str | None:
        return VALUE

    def cold_start(self) -> str:
        return VALUE

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Generate no client's value: every client has a slot."""
        return iter(())

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        if counted := cohort(updates):
            with ExitStack() as opened:
                writers = {key: opened.enter_context(self._vault.writer(key, self._kept(key))) for key in self.keys}
                for name, mean in self._means(counted):
                    for key, value in self.apply(name, mean).items():
                        writers[key].put(name, value)
        return {}

    def _means(self, updates: Sequence[PartUpdate]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name, and its mean over the cohort."""
        shares = self._shares(updates)
        for name in self._known():
            yield name, weighted_mean(name, updates, shares)

    def apply(self, name: str, mean: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the next value of a tensor under each of `keys`: here the mean itself."""
        return {VALUE: mean}

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """No-op: all clients share one value."""
        return {}

    def _shares(self, updates: Sequence[PartUpdate]) -> list[float]:
        return shares_of(updates, uniform=False)

    def _kept(self, key: str) -> Manifest:
        """Return dtype and shape of the tensors under a key: here those of the part."""
        return self._known()

    def _known(self) -> Manifest:
        if self._manifest is None:
            self._manifest = manifest_in(self._vault.read(VALUE))
        return self._manifest


class Mean(SharedValue):
    """The weighted mean (FedAvg; the shared rest of every other method), or a robust rule in its place.

    With `server_mix` beta, xi <- (1 - beta) xi + beta * the mean (pFedMe, Algorithm 1). With `shared_optimiser` xi takes a step
    of an optimiser along the mean change instead (`stepped`).

    With `robust`, a median or a trimmed mean of every number takes the place of the sum (memory: one tensor of all updates), or
    the mean of the updates that Multi-Krum chooses by the distances of whole updates, for which they are read twice. "clip"
    changes nothing here: the updates are clipped before they arrive (fedserver.lab.checks).
    """

    _settings: MeanSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys = (VALUE, *moments(self._settings.shared_optimiser))

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        super().start(initial)
        for key, tensors in at_start(self._settings, initial).items():
            write(self._vault, key, tensors)

    def _means(self, updates: Sequence[PartUpdate]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the rule makes of each tensor: a vote over all its rows, or the mean of the updates that are chosen."""
        if self._settings.robust in ("median", "trimmed-mean"):
            for name in self._known():
                yield name, self._voted(name, updates)
        elif self._settings.robust == "multi-krum":
            chosen = self._chosen(updates)
            for name in self._known():
                yield name, weighted_mean(name, chosen, [1 / len(chosen)] * len(chosen))
        else:
            yield from super()._means(updates)

    def _chosen(self, updates: Sequence[PartUpdate]) -> list[PartUpdate]:
        """Return the updates that Multi-Krum chooses, by the inner products of their differences from the first update."""
        first = manifest_in(updates[0].tensors)
        columns = ([name] if DTYPES[first[name].dtype].is_floating_point else [] for name in self._known())
        grams = [gram(stack(updates, names), exact=True, from_first=True) for names in columns]
        chosen = votes.multi_krum(torch.stack(grams).sum(dim=0), self._settings.attackers, updates[0].absent)
        return [updates[place] for place in chosen]

    def apply(self, name: str, mean: torch.Tensor) -> Mapping[str, torch.Tensor]:
        mix = self._settings.server_mix
        if self._settings.shared_optimiser != "none":
            states = {key: self._vault.read(key) for key in self.keys}
            return stepped(self._settings, {key: state[name] for key, state in states.items() if name in state}, mean)
        return {VALUE: mean if mix == 1 else mixed(self._vault.read(VALUE)[name], mean, mix)}

    def _shares(self, updates: Sequence[PartUpdate]) -> list[float]:
        return shares_of(updates, self._settings.uniform)

    def _kept(self, key: str) -> Manifest:
        return self._known() if key == VALUE else manifest_of_moments(self._known())

    def _voted(self, name: str, updates: Sequence[PartUpdate]) -> torch.Tensor:
        """Return the robust rule over all updates' numbers of a tensor; integers take the mean of the middle, rounded."""
        first = updates[0].tensors[name]
        exact = first.is_floating_point()
        dtype = torch.promote_types(first.dtype, torch.float32) if exact else torch.float64
        X_SN = torch.stack([update.tensors[name].reshape(-1).to(dtype) for update in updates])
        result = torch.cat([self._vote(X_SB, updates[0].absent) for X_SB in torch.split(X_SN, COLUMNS, dim=1)]).view(
            first.shape
        )
        return result.to(first.dtype) if exact else result.round_().to(first.dtype)

    def _vote(self, X_SB: torch.Tensor, absent: int) -> torch.Tensor:
        if self._settings.robust == "median":
            return votes.median(X_SB)
        return votes.trimmed_mean(X_SB, self._settings.attackers, absent)


def mixed(old: torch.Tensor, new: torch.Tensor, mix: float) -> torch.Tensor:
    """Return old + mix * (new - old), in at least float32 (integers: float64, rounded), in the tensor's own dtype."""
    exact = old.is_floating_point()
    dtype = torch.promote_types(old.dtype, torch.float32) if exact else torch.float64
    result = torch.lerp(old.to(dtype), new.to(dtype), mix)
    return result.to(old.dtype) if exact else result.round_().to(old.dtype)


def shares_of(updates: Sequence[PartUpdate], uniform: bool) -> list[float]:
    """Return m_i / M of each update, or 1 / S; they sum to one."""
    weights = [1.0 if uniform else update.weight for update in updates]
    total = sum(weights)
    return [weight / total for weight in weights]


def weighted_mean(name: str, updates: Sequence[PartUpdate], shares: Sequence[float]) -> torch.Tensor:
    """Return sum_i share_i * tensor_i in the given order, computed in at least float32, in the tensor's own dtype.

    Integers (a normalisation layer's batch counter) take the rounded mean. With the maximum one client with many batches would
    decide for all, and a counter that is off by less than one batch changes nothing.
    """
    dtype, total = torch.float32, torch.empty(0)
    for number, (update, share) in enumerate(zip(updates, shares, strict=True)):
        tensor = update.tensors[name]
        if not number:
            dtype = tensor.dtype
            wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
            total = torch.zeros(tensor.shape, dtype=wide)
        total.add_(tensor.to(total.dtype), alpha=share)
    return total.to(dtype) if dtype.is_floating_point else total.round_().to(dtype)
