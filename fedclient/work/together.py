"""Workers that wait until several devices have an order, and have these carried out side by side (fedclient.work.stacked).

Which devices meet is a matter of time; what each of them comes to is the same to rounding whoever it meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from attune.fedclient.work.job import Failed
from attune.fedclient.work.worker import Inline, Work, Worker

if TYPE_CHECKING:
    from attune.fedclient.messages import Result
    from attune.fedclient.work.stacked.advice import Advice
    from attune.fedclient.work.stacked.lockstep import Stacked

Executor = Literal["sequential", "stacked", "auto"]
Ended = Sequence["Result | Failed"]

QUIET_TURNS = 64  # of the event loop without another order: then nobody in this process is about to bring one
QUIET_S = 0.05  # the same over a network: devices are sent a round's orders within some milliseconds


class Side:
    """Carries out orders that are there together. Belongs to the thread of the tensors; torch is imported by its first use.

    executor: "auto" tries at the first orders of several devices what is faster, and stays with it. chosen: hears of it.
    """

    def __init__(self, executor: Executor, chosen: Callable[[Advice], None] = lambda advice: None) -> None:
        self.executor, self._chosen = executor, chosen
        self._stacked: Stacked | None = None

    def __repr__(self) -> str:
        return f"Side({self.executor!r}, {self._stacked})"

    @property
    def reasons(self) -> list[str]:
        """Why something goes one by one, each reason once."""
        return self._stacked.reasons if self._stacked is not None else []

    def run(self, works: Sequence[Work]) -> Ended:
        """What each comes to, in their order."""
        from attune.fedclient.work.stacked.advice import advise
        from attune.fedclient.work.stacked.lockstep import Stacked, one_by_one

        if self.executor == "auto" and len(works) > 1:
            advice = advise([work.learner for work in works])
            self.executor = advice.executor
            self._chosen(advice)
        runs = [work.learner.work(work.order, work.fetched, work.bytes_down, work.progress, work.cancelled) for work in works]
        if self.executor != "stacked":
            return one_by_one(runs)
        self._stacked = self._stacked or Stacked()
        return self._stacked.run(runs)


class Gatherer:
    """Collects orders until it is quiet, then hands all of them to `run`; those that come meanwhile are next."""

    def __init__(self, run: Callable[[Sequence[Work]], Awaitable[Ended]]) -> None:
        self._run = run
        self._waiting: list[tuple[Work, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Gatherer, {len(self._waiting)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def carry_out(self, work: Work, quiet: Callable[[Gatherer], Awaitable[None]]) -> Result:
        """What it comes to. quiet: returns when nobody else is to be waited for. Errors: those of Learner.carry_out."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._gather(quiet))
        return await future

    async def _gather(self, quiet: Callable[[Gatherer], Awaitable[None]]) -> None:
        while self._waiting:
            await quiet(self)
            taken = [(work, future) for work, future in self._waiting if not future.done()]  # who was stopped is left out
            self._waiting = []
            if taken:
                await self._answer(taken)

    async def _answer(self, taken: Sequence[tuple[Work, asyncio.Future[Result]]]) -> None:
        try:
            ended = await self._run([work for work, _ in taken])
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(taken, ended, strict=True):
            if future.done():
                continue
            if isinstance(result, Failed):
                future.set_exception(result.error)
            else:
                future.set_result(result)


class InlineTogether(Inline):
    """For a process in which nothing happens beside the federation: waits until no device has anything else to do."""

    def __init__(self, stopped: Callable[[], bool], side: Side) -> None:
        super().__init__(stopped)
        self.side = side
        self._gatherer = Gatherer(self._run)

    async def carry_out(self, work: Work) -> Result:
        stoppable = replace(work, cancelled=lambda: self._stopped() or work.cancelled())
        return await self._gatherer.carry_out(stoppable, _turns)

    async def _run(self, works: Sequence[Work]) -> Ended:
        return self.side.run(works)


class Together(Worker):
    """For devices that share a process and have connections of their own. turns: how many hold tensors at one time."""

    def __init__(self, turns: int, keep: bool, side: Side) -> None:
        super().__init__(turns, keep)
        self.side = side
        self._gatherer = Gatherer(self._run)

    async def carry_out(self, work: Work) -> Result:
        return await self._gatherer.carry_out(work, _seconds)

    async def _run(self, works: Sequence[Work]) -> Ended:
        return await self.do(self.side.run, works)


async def _turns(gatherer: Gatherer) -> None:
    quiet, seen = 0, gatherer.waiting
    while quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        quiet = quiet + 1 if gatherer.waiting == seen else 0
        seen = gatherer.waiting


async def _seconds(gatherer: Gatherer) -> None:
    seen = 0
    while gatherer.waiting > seen:
        seen = gatherer.waiting
        await asyncio.sleep(QUIET_S)
