"""The learners of one process: made where they are asked for, and kept until they are to go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from attune.common.errors import AttuneError
from attune.fedclient.work.learner import Learner, make_learner
from attune.fedclient.work.processes.messages import (
    Answer,
    CarryOut,
    Clear,
    Cleared,
    Done,
    Finish,
    Finished,
    Held,
    Place,
    Raised,
    Request,
    Wake,
)  # fmt: skip
from attune.fedclient.work.processes.pipe import packed, unpacked
from attune.fedclient.work.trainer import Progress


class Seats:
    """A device that was placed stays: its data, its plan and its orders. Its learner may come and go."""

    def __init__(self) -> None:
        self._placed: dict[str, Place] = {}
        self._learners: dict[str, Learner] = {}

    def __repr__(self) -> str:
        return f"<Seats of {len(self._placed)} devices, {len(self._learners)} of them awake>"

    def drop(self, names: Iterable[str]) -> None:
        """The learners of these devices go. Their orders have all that was learnt."""
        for name in names:
            self._learners.pop(name, None)

    def answer(self, request: Request, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        """What is asked for; whatever goes wrong is an answer too."""
        try:
            return self._answer(request, progress, cancelled)
        except Exception as error:
            return Raised(_portable(error))

    def _answer(self, request: Request, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        match request:
            case Place(name):
                self._learners.pop(name, None)
                self._placed[name] = request
                return self._held(name)
            case Wake(name):
                return self._held(name)
            case CarryOut(name, order, fetched, bytes_down):
                learner = self._learner(name)
                result = learner.carry_out(order, fetched, bytes_down, progress, cancelled)
                return Done(result, learner.served, learner.size_bytes, learner.orders)
            case Finish(name):
                return Finished(self._learner(name).finished())
            case Clear(path):
                sys.path[:] = path
                self._placed.clear()
                self._learners.clear()
                return Cleared()

    def _learner(self, name: str) -> Learner:
        if name not in self._learners:
            placed = self._placed[name]
            self._learners[name] = make_learner(placed.plan, placed.shard, name, lambda _: placed.orders, placed.options)
        return self._learners[name]

    def _held(self, name: str) -> Held:
        learner = self._learner(name)
        return Held(learner.holdings, learner.standardiser, learner.size_bytes, learner.newest, learner.orders)


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent."""
    try:
        unpacked(*packed(error))
        return error
    except Exception:
        return AttuneError(f"{type(error).__name__}: {error}")
