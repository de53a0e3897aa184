"""In-process counterparts of the network's parts: the server's side of a call, and workers on the caller's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from attune.common.exchange.messages import Description, Hello, SecureMessage, StatisticsReport, Update, UploadTarget
from attune.common.wire.blobs import read_frames
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import Executor, Work, result_of
from attune.fedclient.work.worker import LearnerCache, Worker, deliver, local_learner
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import Stream

OnTrouble = Callable[[str, str], None]  # takes the device and the reason
OnAnswer = Callable[[], None]


class InProcessServer:
    """Implementation of fedclient.link.local.LocalServer.

    Args:
        coordinator: The server's coordinator.
        on_trouble: Called when a device cannot carry out an order, before the round learns of it.
        on_answer: Called after each answer of a device.
    """

    def __init__(self, coordinator: Coordinator, on_trouble: OnTrouble, on_answer: OnAnswer) -> None:
        self._state, self._members, self._updates = coordinator.state, coordinator.members, coordinator.updates
        self._masked, self._on_trouble, self._on_answer = coordinator.masked, on_trouble, on_answer

    async def connect(self, name: str, hello: Hello) -> Stream:
        return self._members.connect(name, hello)

    def disconnect(self, name: str, stream: Stream) -> None:
        self._members.disconnect(stream)

    async def progress(self, name: str, order_id: str, done: float) -> None:
        await self._members.progress(name, order_id, done)

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        self._on_trouble(name, reason)
        await self._members.trouble(name, order_id, reason)

    def secure(self, name: str, message: SecureMessage) -> None:
        self._members.secure(name, message)

    def statistics(self, name: str, report: StatisticsReport) -> None:
        self._masked.reported(name, report)

    def described(self, name: str, said: Description) -> None:
        self._members.described(name, said)

    async def download(self, name: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        for frame in read_frames(self._state.storage.blobs.open(self._state.book.offer(name, digest)), offset):
            yield frame

    async def upload_offset(self, name: str, target: UploadTarget) -> int:
        return self._updates.offset(name, target)

    async def upload(self, name: str, target: UploadTarget, frames: Iterator[bytes]) -> int:
        sink = await self._updates.open(name, target)
        skip = sink.offset - target.offset  # bytes that an earlier call has already brought
        for frame in frames:
            await self._updates.write(name, target, sink, [frame[skip:]])
            skip = max(0, skip - len(frame))
        await self._updates.complete(name, target, sink)
        return target.size

    async def submit(self, name: str, update: Update) -> bool:
        receipt = await self._updates.submit(name, update)
        self._on_answer()
        return not receipt.late


T = TypeVar("T")


class InlineWorker(Worker):
    """Worker that carries out one order after the other, on the thread of the event loop.

    Args:
        stopped: Returns whether the work must be given up.
        awake_bytes: Most bytes that learners of waiting devices may hold in memory.
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
    """Worker that collects the orders of a cohort, and hands them to `executor` together.

    Args:
        stopped: Returns whether the work must be given up.
        awake_bytes: Most bytes that learners of waiting devices may hold in memory.
        executor: Carries out all orders of a cohort.
        awaited: Returns how many devices have an order and have not answered it. Call `answered` after each answer.
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
        """Start the cohort if every device that is awaited has handed over its order."""
        if not self._waiting or len(self._waiting) < self._awaited():
            return
        cohort, self._waiting = self._waiting, []
        deliver(cohort, self.executor.run([work for work, _ in cohort]))
