"""The server's side of a call in this process: what fedserver.rpc does for gRPC, for fedclient.link.local."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from attune.common.plan import Profile
from attune.common.protocol import SPOKEN
from attune.common.wire.frames import read_frames
from attune.fedclient import messages as device
from attune.fedserver.core import messages as server
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.streams import Stream
from attune.fedserver.federation.updates import Updates
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.stores.uploads import Target

Troubled = Callable[[str, str], None]  # (device, reason)
Answered = Callable[[], None]


class InProcess:
    """Implements fedclient.link.local.LocalServer.

    troubled: hears of a device that cannot carry out an order, before the round does. answered: is called after each answer.
    """

    def __init__(
        self,
        members: Members,
        updates: Updates,
        coordinator: Coordinator,
        blobs: Blobs,
        troubled: Troubled,
        answered: Answered,
    ) -> None:
        self._members, self._updates, self._book, self._blobs = members, updates, coordinator.book, blobs
        self._inline_bytes = coordinator.settings.server.inline_bytes
        self._troubled, self._answered = troubled, answered

    async def connect(self, name: str, software: str, profile: Profile) -> Spoken:
        return Spoken(self._members, self._members.connect(name, profile, software, self._inline_bytes, SPOKEN))

    async def progress(self, name: str, order_id: str, done: float) -> None:
        await self._members.progress(name, order_id, done)

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        self._troubled(name, reason)
        await self._members.trouble(name, order_id, reason)

    async def download(self, name: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        for frame in read_frames(self._blobs.open(self._book.offer(name, digest)), offset):
            yield frame

    async def upload_offset(self, name: str, target: device.UploadTarget) -> int:
        return self._updates.offset(name, _target(target))

    async def upload(self, name: str, target: device.UploadTarget, frames: Iterator[bytes]) -> int:
        announced = _target(target)
        sink = await self._updates.open(name, announced)
        skip = sink.offset - target.offset  # what an earlier call has already brought
        for frame in frames:
            await self._updates.write(name, announced, sink, [frame[skip:]])
            skip = max(0, skip - len(frame))
        await self._updates.complete(name, announced, sink)
        return target.size

    async def submit(self, name: str, update: device.Update) -> bool:
        parts = tuple(
            server.BlobRef(r.part, r.digest, r.size, r.version, data=r.data, encoding=r.encoding) for r in update.parts
        )
        metrics_json = msgspec.json.encode(update.metrics)
        late = await self._updates.submit(name, server.Update(update.order_id, parts, update.samples, metrics_json))
        self._answered()
        return not late


class Spoken:
    """Implements fedclient.link.local.LocalStream."""

    def __init__(self, members: Members, stream: Stream) -> None:
        self._members, self._stream = members, stream

    async def next(self) -> device.Event | None:
        message = await self._stream.next()
        return None if message is None else _event(message)

    async def close(self) -> None:
        self._members.disconnect(self._stream)


def _event(message: server.ToDevice) -> device.Event:
    match message:
        case server.Welcome(plan):
            return device.Welcomed(msgspec.json.encode(plan))
        case server.Notice(text):
            return device.Noticed(text)
        case server.Farewell(text):
            return device.Finished(text)
        case server.Order():
            return device.Ordered(_order(message))


def _order(order: server.Order) -> device.Order:
    """Without its deadline: nobody is late in a process in which one thing is done after the other."""
    return device.Order(
        id=str(order.id),
        round=order.id.round,
        train=order.id.work == "train",
        downloads=_refs(order.downloads),
        returns=order.returns,
        cold_start=_refs(order.cold_start),
        trains=order.trains,
        encodings=order.encodings,
        prior=order.prior,
    )


def _refs(refs: tuple[server.BlobRef, ...]) -> tuple[device.BlobRef, ...]:
    return tuple(_ref(ref) for ref in refs)


def _ref(ref: server.BlobRef) -> device.BlobRef:
    smaller = None if ref.smaller is None else _ref(ref.smaller)
    return device.BlobRef(ref.part, ref.digest, ref.size, ref.version, ref.data, ref.encoding, smaller, ref.base)


def _target(target: device.UploadTarget) -> Target:
    return Target(target.order_id, target.part, target.digest, target.size, target.offset)
