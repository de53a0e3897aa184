"""Workers for a process in which nothing happens beside the federation: orders are carried out on the caller's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import Executor, Work, result_of
from attune.fedclient.work.worker import LearnerCache, Worker, deliver, local_learner

T = TypeVar("T")


class InlineWorker(Worker):
    """One order after the other, each as soon as its values are here.

    Args:
        stopped: Whether to give up all work.
        awake_bytes: What learners of devices that wait may hold in memory.
    """

    def __init__(self, stopped: Callable[[], bool], awake_bytes: float) -> None:
        self.learners, self.make_learner = LearnerCache(awake_bytes), local_learner
        self.turn, self._stopped = contextlib.nullcontext(), stopped

    def __exit__(self, *error: object) -> None:
        """No-op: there is no thread to end."""

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)

    async def carry_out(self, work: Work) -> OrderResult:
        return await super().carry_out(work.cancelled_by(self._stopped))


class CohortWorker(InlineWorker):
    """Orders wait for each other, and go to `executor` together.

    Args:
        stopped: Whether to give up all work.
        awake_bytes: What learners of devices that wait may hold in memory.
        executor: Carries out all orders of a cohort.
        awaited: How many devices have an order and have not answered it; `answered` must be called after each answer.
    """

    def __init__(self, stopped: Callable[[], bool], awake_bytes: float, executor: Executor, awaited: Callable[[], int]) -> None:
        super().__init__(stopped, awake_bytes)
        self.executor, self._awaited = executor, awaited
        self._waiting: list[tuple[Work, asyncio.Future[Future[OrderResult]]]] = []

    async def carry_out(self, work: Work) -> OrderResult:
        begun: asyncio.Future[Future[OrderResult]] = asyncio.get_running_loop().create_future()
        self._waiting.append((work.cancelled_by(self._stopped), begun))
        self.answered()
        return await result_of(await begun)

    def answered(self) -> None:
        """Begin if no device is missing any longer."""
        if not self._waiting or len(self._waiting) < self._awaited():
            return
        cohort, self._waiting = self._waiting, []
        deliver(cohort, self.executor.run([work for work, _ in cohort]))
