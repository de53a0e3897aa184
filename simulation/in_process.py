"""In-process counterparts of the network's parts: both sides of a call, no byte of which passes a socket, and workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import cache, cached_property
from typing import Any, NoReturn, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.errors import Unreachable
from attune.common.exchange.messages import (
    Answer,
    Beat,
    Description,
    Hello,
    SecureMessage,
    StatisticsReport,
    Update,
    UploadTarget,
    Welcome,
)
from attune.common.identity.certificates import (
    AUTHORITY,
    CLIENT,
    FIRST_DAY,
    LAST_DAY,
    Lifetime,
    authority_certificate,
    leaf_certificate,
    subject,
)
from attune.common.identity.credential import Credential, key_pem
from attune.common.wire.blobs import read_frames
from attune.fedclient.home import Identity
from attune.fedclient.link.port import Broken, Handle
from attune.fedclient.messages import OrderResult, StreamOpened
from attune.fedclient.work.executor import Executor, Work, result_of
from attune.fedclient.work.worker import LearnerCache, Worker, deliver, local_learner
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import Stream

OnTrouble = Callable[[str, str], None]  # takes the device and the reason
OnAnswer = Callable[[], None]


class InProcessServer:
    """Server in this process for devices, which name themselves at each call.

    Args:
        coordinator: The server's coordinator.
        on_trouble: Called when a device cannot carry out an order, before the round learns of it.
        on_answer: Called after each answer of a device.
    """

    def __init__(self, coordinator: Coordinator, on_trouble: OnTrouble, on_answer: OnAnswer) -> None:
        self._state, self._members, self._updates = coordinator.state, coordinator.members, coordinator.updates
        self._survey, self._on_trouble, self._on_answer = coordinator.survey, on_trouble, on_answer

    async def connect(self, name: str, hello: Hello) -> Stream:
        return self._members.connect(name, hello)

    def disconnect(self, name: str, stream: Stream) -> None:
        self._members.disconnect(stream)

    async def progress(self, name: str, order_id: str, done: float) -> None:
        await self._members.progress(name, order_id, done)

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        self._on_trouble(name, reason)
        await self._members.trouble(name, order_id, reason)

    def answer(self, name: str, message: Answer) -> None:
        if isinstance(message, SecureMessage):
            self._members.secure(name, message)
        elif isinstance(message, StatisticsReport):
            self._survey.reported(name, message)
        elif isinstance(message, Description):
            self._members.described(name, message)

    async def download(self, name: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        """Yield the bytes of an offered blob from `offset` on.

        Raises:
            UnknownBlob: The server does not offer it (raised while reading).
        """
        for frame in read_frames(self._state.storage.blobs.open(self._state.book.offer(name, digest)), offset):
            yield frame

    async def upload_offset(self, name: str, target: UploadTarget) -> int:
        return self._updates.offset(name, target)

    async def upload(self, name: str, target: UploadTarget, frames: Iterator[bytes]) -> int:
        """Take in the bytes from target.offset on, and return how many bytes of the blob are here and checked."""
        sink = await self._updates.open(name, target)
        skip = sink.offset - target.offset  # bytes that an earlier call has already brought
        for frame in frames:
            await self._updates.write(name, target, sink, [frame[skip:]])
            skip = max(0, skip - len(frame))
        await self._updates.complete(name, target, sink)
        return target.size

    async def submit(self, name: str, update: Update) -> bool:
        """Return whether the update counts."""
        receipt = await self._updates.submit(name, update)
        self._on_answer()
        return not receipt.late


T = TypeVar("T")


class InlineWorker(Worker):
    """Worker that carries out one order after the other, on the thread of the event loop, which hears nothing meanwhile.

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
        return await super().carry_out(self.silent(work))

    def silent(self, work: Work) -> Work:
        """Return the same work, which tells of no progress, and is given up when the simulation is."""
        return work.cancelled_by(self._stopped, progress=lambda done: None)


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
        self._waiting.append((self.silent(work), begun))
        self.answered()
        return await result_of(await begun)

    def answered(self) -> None:
        """Start the cohort if every device that is awaited has handed over its order."""
        if not self._waiting or len(self._waiting) < self._awaited():
            return
        cohort, self._waiting = self._waiting, []
        deliver(cohort, self.executor.run([work for work, _ in cohort]))


SAID = 16  # messages that may wait for the server; what is said beyond that is dropped


class _Breaking:
    """A block in which errors that stand for a failing transport turn into Broken."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ConnectionError, Unreachable)):
            raise Broken(f"lost the server ({error})", connecting=isinstance(error, ConnectionRefusedError)) from None


@cache
def _authority() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Return the key of this process's authority, and its certificate as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key, authority_certificate(key.public_key(), key).public_bytes(Encoding.PEM)


class LocalLink:
    """The link of the device `name` to `server`."""

    renews = False

    def __init__(self, name: str, server: InProcessServer) -> None:
        self.name, self.open = name, asyncio.Event()
        self.inline_bytes, self.waits = 0, False  # in one process no upload is on its way during another call
        self._server = server
        self._said: asyncio.Queue[tuple[str, float | str]] = asyncio.Queue(SAID)

    def __repr__(self) -> str:
        return f"<LocalLink of {self.name}, {'open' if self.open.is_set() else 'closed'}>"

    async def control(self, hello: Hello, handle: Handle) -> NoReturn:
        self._said = asyncio.Queue(SAID)
        with _Breaking():
            stream = await self._server.connect(self.name, hello)
        speaking = asyncio.create_task(self._speak(self._said))
        try:
            self.open.set()
            await handle(StreamOpened())
            with _Breaking():
                while (message := await stream.next()) is not None:
                    if isinstance(message, Welcome):
                        self.inline_bytes = message.inline_bytes
                    if not isinstance(message, Beat):
                        await handle(message)
        finally:
            self.open.clear()
            speaking.cancel()
            self._server.disconnect(self.name, stream)
        raise Broken("the server closed the connection")

    async def _speak(self, said: asyncio.Queue[tuple[str, float | str]]) -> None:
        while True:
            order_id, what = await said.get()
            if isinstance(what, str):
                await self._server.trouble(self.name, order_id, what)
            else:
                await self._server.progress(self.name, order_id, what)

    def progress(self, order_id: str, done: float) -> None:
        self._say(order_id, done)

    def trouble(self, order_id: str, reason: str) -> None:
        self._say(order_id, reason)

    def answer(self, message: Answer) -> None:
        if self.open.is_set():
            self._server.answer(self.name, message)

    @cached_property
    def identity(self) -> Identity:
        """An identity of this process alone: within it, no authority is needed but for secure aggregation."""
        authority, root_pem = _authority()
        key = ec.generate_private_key(ec.SECP256R1())
        lifetime = Lifetime(FIRST_DAY, LAST_DAY)
        certificate = leaf_certificate(
            key.public_key(), subject(self.name), CLIENT, lifetime, issuer=AUTHORITY, signer=authority
        )
        credential = Credential(key_pem(key), certificate.public_bytes(Encoding.PEM))
        return Identity(self.name, credential, root_pem)

    async def decline(self, reason: str) -> None:
        """Decline to take part. No-op: the simulation gets the device's error itself."""

    def _say(self, order_id: str, what: float | str) -> None:
        if self.open.is_set():
            with contextlib.suppress(asyncio.QueueFull):
                self._said.put_nowait((order_id, what))

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        with _Breaking():
            async for frame in self._server.download(self.name, digest, offset):
                take(frame)

    async def upload_offset(self, target: UploadTarget) -> int:
        with _Breaking():
            return await self._server.upload_offset(self.name, target)

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        with _Breaking():
            received = await self._server.upload(self.name, target, frames)
        if received < target.size:
            raise Broken(f"the server has {received} of {target.size} bytes")

    async def submit(self, update: Update) -> bool:
        with _Breaking():
            return await self._server.submit(self.name, update)

    async def renew(self) -> bool:
        return False

    async def diagnosis(self) -> str:
        return "nobody answers in this process"

    async def close(self) -> None:
        self.open.clear()
