"""The executor that computes many devices at once. With "auto" it first tries which way is faster on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from attune.fedclient.work.executor import Work, done

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult
    from attune.fedclient.work.learner import Learner
    from attune.fedclient.work.stacked.lockstep import Stacked

Mode = Literal["sequential", "stacked", "auto"]  # sequential: the result of a trial

TRIED = 5  # devices that are trained one by one; the others take as long in proportion to their steps


@dataclass(frozen=True)
class Advice:
    """Recommended executor, and the seconds of one round of training either way."""

    executor: Literal["sequential", "stacked"]
    one_by_one_s: float
    stacked_s: float
    reasons: tuple[str, ...] = ()  # why it cannot be stacked; then there is no time for it

    def __str__(self) -> str:
        other = "; ".join(self.reasons) if self.reasons else f"{self.stacked_s:.3g} s stacked"
        return f"{self.executor}: {self.one_by_one_s:.3g} s one by one, {other}"


class StackedExecutor:
    """Implements Executor. It belongs to the thread of the tensors, where torch is imported by the first orders.

    Args:
        mode: "auto" tries at the first orders of several devices what is faster, and stays with it.
        advised: Is called with the result of the trial.
    """

    def __init__(self, mode: Literal["stacked", "auto"] = "stacked", advised: Callable[[Advice], None] = lambda advice: None):
        self.mode: Mode = mode
        self._advised = advised
        self.stacked: Stacked | None = None

    def __repr__(self) -> str:
        return f"StackedExecutor({self.mode!r}, {self.stacked})"

    @property
    def reasons(self) -> list[str]:
        """Why some work went one by one, each reason once."""
        return self.stacked.reasons if self.stacked is not None else []

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        from attune.fedclient.work.executor import FailedWork
        from attune.fedclient.work.stacked.lockstep import Stacked, one_by_one

        if self.mode == "auto" and len(works) > 1:
            advice = advise([cast("Learner", work.learner) for work in works])
            self.mode = advice.executor
            self._advised(advice)
        runs = [cast("Learner", work.learner).jobs(work) for work in works]
        if self.mode != "stacked":
            ended = one_by_one(runs)
        else:
            self.stacked = self.stacked or Stacked()
            ended = self.stacked.run(runs)
        return [done(end.error if isinstance(end, FailedWork) else end) for end in ended]


def advise(learners: Sequence[Learner]) -> Advice:
    """Train the devices and throw the results away: some of them one by one, all of them stacked."""
    from attune.fedclient.work.stacked.lockstep import Stacked, one_by_one

    stacked = Stacked()
    stacked.run([learner.trial() for learner in learners[:2]])  # finds out what cannot be stacked
    some = sorted(learners, key=_steps)[:: -(-len(learners) // TRIED)]
    share = sum(map(_steps, some)) / sum(map(_steps, learners))
    one_by_one_s = _seconds(lambda: one_by_one([learner.trial() for learner in some])) / share
    if stacked.reasons:
        return Advice("sequential", one_by_one_s, math.inf, tuple(stacked.reasons))
    stacked_s = _seconds(lambda: stacked.run([learner.trial() for learner in learners]))
    return Advice("stacked" if stacked_s < one_by_one_s else "sequential", one_by_one_s, stacked_s)


def _steps(learner: Learner) -> int:
    """Return a number in proportion to the steps that the device takes."""
    return 1 if learner.plan.train.local_steps else max(1, len(learner.data.train_x))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
