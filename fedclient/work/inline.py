"""Orders on the caller's thread: for a process in which nothing happens beside the federation.

An executor decides how the orders of a whole cohort are carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attune.fedclient.work.worker import Awake, Work, Worker, made_here

if TYPE_CHECKING:
    from attune.fedclient.messages import Result

T = TypeVar("T")


class Executor(Protocol):
    """How many orders are carried out that could be carried out at one time."""

    def carry_out(self, works: Sequence[Work]) -> Sequence[Result | Exception]:
        """What each comes to, in the same order: what Learner.carry_out returns or raises."""


class Inline(Worker):
    """One order after the other, each as soon as all is there. stopped: whether what is at work is to be given up."""

    def __init__(self, stopped: Callable[[], bool], awake_bytes: float) -> None:
        self.awake, self.make = Awake(awake_bytes), made_here
        self.turn, self._stopped = contextlib.nullcontext(), stopped

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self.awake}>"

    def __exit__(self, *error: object) -> None:
        """There is nothing to end."""

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)

    async def carry_out(self, work: Work) -> Result:
        return self._stoppable(work).run()

    def _stoppable(self, work: Work) -> Work:
        return replace(work, cancelled=lambda: self._stopped() or work.cancelled())


class Cohorts(Inline):
    """Orders wait for each other, and are handed to `executor` together.

    awaited: how many devices have an order and have not answered it. Whoever takes answers in calls `look` after each one.
    """

    def __init__(self, stopped: Callable[[], bool], awake_bytes: float, executor: Executor, awaited: Callable[[], int]) -> None:
        super().__init__(stopped, awake_bytes)
        self._executor, self._awaited = executor, awaited
        self._waiting: list[tuple[Work, asyncio.Future[Result]]] = []

    async def carry_out(self, work: Work) -> Result:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._stoppable(work), result))
        self.look()
        return await result

    def look(self) -> None:
        """Begins if nobody is missing any longer."""
        if not self._waiting or len(self._waiting) < self._awaited():
            return
        waiting, self._waiting = self._waiting, []
        results = self._executor.carry_out([work for work, _ in waiting])
        hand_out(waiting, results)


def hand_out(waiting: Sequence[tuple[Work, asyncio.Future[Result]]], results: Sequence[Result | Exception]) -> None:
    """To each that waits what its work came to; whoever was stopped meanwhile is left out."""
    for (_, future), result in zip(waiting, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
