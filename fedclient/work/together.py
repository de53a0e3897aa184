"""The executor that computes devices side by side, and the worker that lets it do so for devices with connections of their own.

Which devices meet is a matter of time over a network; what each comes to is the same to rounding whoever it meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast

from attune.fedclient.work.inline import Executor, hand_out
from attune.fedclient.work.job import Failed
from attune.fedclient.work.worker import Work, Worker

if TYPE_CHECKING:
    from attune.fedclient.messages import Result
    from attune.fedclient.work.stacked.advice import Advice
    from attune.fedclient.work.stacked.lockstep import Stacked

How = Literal["sequential", "stacked", "auto"]  # sequential: what a trial has come to

QUIET_S = 0.05  # without another order: devices are sent a round's orders within some milliseconds


class SideBySide:
    """Implements Executor; belongs to the thread of the tensors, where torch is imported by the first orders.

    how: "auto" tries at the first orders of several devices what is faster, and stays with it. advised: hears of it.
    """

    def __init__(self, how: Literal["stacked", "auto"] = "stacked", advised: Callable[[Advice], None] = lambda advice: None):
        self.how: How = how
        self._advised = advised
        self.stacked: Stacked | None = None

    def __repr__(self) -> str:
        return f"SideBySide({self.how!r}, {self.stacked})"

    @property
    def reasons(self) -> list[str]:
        """Why something goes one by one, each reason once."""
        return self.stacked.reasons if self.stacked is not None else []

    def carry_out(self, works: Sequence[Work]) -> Sequence[Result | Exception]:
        """As Executor."""
        from attune.fedclient.work.learner import Learner
        from attune.fedclient.work.stacked.advice import advise
        from attune.fedclient.work.stacked.lockstep import Stacked, one_by_one

        if self.how == "auto" and len(works) > 1:
            advice = advise([cast(Learner, work.learner) for work in works])
            self.how = advice.executor
            self._advised(advice)
        runs = [
            cast(Learner, work.learner).work(work.order, work.fetched, work.bytes_down, work.progress, work.cancelled)
            for work in works
        ]
        if self.how != "stacked":
            ended = one_by_one(runs)
        else:
            self.stacked = self.stacked or Stacked()
            ended = self.stacked.run(runs)
        return [each.error if isinstance(each, Failed) else each for each in ended]


class Together(Worker):
    """Orders that come within QUIET_S of each other are handed to `executor` together; those that come meanwhile are next.

    turns and awake_bytes: as for Worker; as many devices as have a turn can meet.
    """

    def __init__(self, turns: int, awake_bytes: float, executor: Executor) -> None:
        super().__init__(turns, awake_bytes)
        self._executor = executor
        self._waiting: list[tuple[Work, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def carry_out(self, work: Work) -> Result:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, result))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._all())
        return await result

    async def _all(self) -> None:
        while self._waiting:
            await self._quiet()
            waiting, self._waiting = self._waiting, []
            waiting = [(work, result) for work, result in waiting if not result.done()]  # whoever was stopped is left out
            if waiting:
                await self._answer(waiting)

    async def _quiet(self) -> None:
        seen = 0
        while len(self._waiting) > seen:
            seen = len(self._waiting)
            await asyncio.sleep(QUIET_S)

    async def _answer(self, waiting: Sequence[tuple[Work, asyncio.Future[Result]]]) -> None:
        results: Sequence[Result | Exception]
        try:
            results = await self.do(self._executor.carry_out, [work for work, _ in waiting])
        except Exception as error:
            results = [error] * len(waiting)
        hand_out(waiting, results)
