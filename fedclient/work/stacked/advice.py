"""Tries what is faster on this machine: devices one by one, or side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attune.fedclient.work.learner import Learner
from attune.fedclient.work.stacked.lockstep import Stacked, one_by_one

TRIED = 5  # devices that are trained one by one; the others take as long in proportion to their steps


@dataclass(frozen=True)
class Advice:
    """What to take, and the seconds that one round of training takes either way."""

    executor: Literal["sequential", "stacked"]
    one_by_one_s: float
    stacked_s: float
    reasons: tuple[str, ...] = ()  # why it cannot be stacked; then there is no time for it

    def __str__(self) -> str:
        other = "; ".join(self.reasons) if self.reasons else f"{self.stacked_s:.3g} s stacked"
        return f"{self.executor}: {self.one_by_one_s:.3g} s one by one, {other}"


def advise(learners: Sequence[Learner]) -> Advice:
    """Trains the devices for nothing: some of them one by one, all of them side by side. Nothing of them changes."""
    stacked = Stacked()
    stacked.run([each.trial() for each in learners[:2]])  # finds out what cannot be stacked
    some = sorted(learners, key=_work)[:: -(-len(learners) // TRIED)]
    share = sum(map(_work, some)) / sum(map(_work, learners))
    one_by_one_s = _seconds(lambda: one_by_one([each.trial() for each in some])) / share
    if stacked.reasons:
        return Advice("sequential", one_by_one_s, math.inf, tuple(stacked.reasons))
    stacked_s = _seconds(lambda: stacked.run([each.trial() for each in learners]))
    return Advice("stacked" if stacked_s < one_by_one_s else "sequential", one_by_one_s, stacked_s)


def _work(learner: Learner) -> int:
    """In proportion to the steps that the device takes."""
    return 1 if learner.plan.train.local_steps else max(1, len(learner.data.train_x))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
