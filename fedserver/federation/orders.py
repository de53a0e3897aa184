"""Orders: what each device of a step is told to do, from what the round, the settings and the lab say."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from attune.common.protocol import PACKED, RELATIVE
from attune.common.wire.blobs import Blob
from attune.fedserver.core.messages import Order, OrderId, Record
from attune.fedserver.core.orderbook import OrderBook, needs_download
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.records import Device
from attune.fedserver.executors import Executors
from attune.fedserver.federation.journal import WORK, Journal, Stage
from attune.fedserver.federation.streams import Streams
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import Lab
from attune.fedserver.ports.ledger import Ledger

LOG = logging.getLogger("fedserver")
HAS_ORDER = "has its order, and begins"


class Orders:
    """Writes orders into its book and sends them."""

    def __init__(
        self,
        settings: ResolvedSettings,
        ledger: Ledger,
        streams: Streams,
        lab: Lab,
        blobs: Blobs,
        executors: Executors,
        journal: Journal,
    ) -> None:
        self.book, self._journal = OrderBook(), journal
        self._settings, self._ledger, self._streams, self._lab = settings, ledger, streams, lab
        self._blobs, self._executors = blobs, executors

    def __repr__(self) -> str:
        return f"Orders({self.book!r})"

    async def open(
        self, parts: Sequence[str], record: Record, left_s: float, work: str, number: int, devices: Collection[str]
    ) -> None:
        """Sends orders, to be done in `left_s` seconds. parts: those that devices hand in.

        What is served is made for everyone at once, so that it is the same bits after a restart.
        """
        known = await self._known({*record.devices, *devices})
        served = await self._lab.serve(record.devices, _founders(known, record.devices))
        cold_start = await self._lab.cold_start() if work == "evaluate" else {}
        LOG.info("round %d: %s on %d devices", number, work, len(devices))
        packed = await self._packed([*served.values(), cold_start])
        data: dict[str, bytes] = {}  # of small blobs, by digest
        for name in devices:
            if name in known and known[name].progress:
                await self._ledger.update_device(name, progress=0.0)
        for name in devices:
            blobs = served[name] if self._needs_download(record, known.get(name), work) else {}
            trains, returns = self._task_of(parts, record, name) if work == "train" else ((), ())
            order_id, encoding = OrderId(work, number, name), encoding_of(self._settings, blobs)
            order = self.book.write(order_id, blobs, returns, left_s, record.round, cold_start, trains, encoding, packed)
            inline = self._inline(name, order)
            for digest, blob in inline.items():
                if digest not in data:
                    data[digest] = await self._executors.disk(self._bytes, blob)
            if self._streams.get(name) is not None:
                whole = all(ref.digest in inline for ref in (*order.downloads, *order.cold_start))
                self._journal.enter(name, WORK[work] if whole else Stage.WAITING, "" if whole else HAS_ORDER)
            self._streams.send(name, order.carrying({digest: data[digest] for digest in inline}))

    async def _packed(self, served: Iterable[Mapping[str, Blob]]) -> dict[str, Blob]:
        """By the digest of a blob, what is sent in its place."""
        if self._settings.round.encoding != PACKED:
            return {}
        blobs = {blob.digest: blob for parts in served for blob in parts.values()}
        return await self._lab.pack(list(blobs.values()))

    def _inline(self, name: str, order: Order) -> dict[str, Blob]:
        """The blobs that fit into the order itself, by digest, of a device that takes them so."""
        stream = self._streams.get(name)
        room = 0 if stream is None else min(stream.inline_bytes, self._settings.server.inline_bytes)
        found: dict[str, Blob] = {}
        for ref in (*order.downloads, *order.cold_start):
            if ref.digest not in found and ref.size <= room:
                found[ref.digest] = self.book.offer(name, ref.digest)
                room -= ref.size
        return found

    def _bytes(self, blob: Blob) -> bytes:
        source = self._blobs.open(blob)
        try:
            return source.read(0, blob.size)
        finally:
            source.close()

    async def founders(self, names: Iterable[str]) -> list[str]:
        """Who of them enrolled before the first round was closed."""
        asked = list(names)
        return _founders(await self._known(asked), asked)

    async def fetched(self, record: Record, names: Iterable[str], state_round: int, work: str) -> dict[str, dict[str, int]]:
        """Marks for those of `names` that were served the state after `state_round`."""
        asked = list(names)
        known = await self._known(asked)
        return {name: {"fetched": state_round} for name in asked if self._needs_download(record, known.get(name), work)}

    async def _known(self, names: Collection[str]) -> dict[str, Device]:
        return {device.name: device for device in await self._ledger.devices(names)}

    def _task_of(self, parts: Sequence[str], record: Record, name: str) -> tuple[Sequence[str], Sequence[str]]:
        """What a device trains (all, if nothing is named) and which parts it hands in."""
        adaptation = self._settings.adaptation
        if record.adapting and adaptation is not None:
            return adaptation.trains, [part for part in parts if part in adaptation.returns]
        return (), parts if name in record.cohort else ()

    def _needs_download(self, record: Record, device: Device | None, work: str) -> bool:
        # What newcomers leave as it is must be the federation's, not what a device that was never sampled made of it.
        train = "sampled" if record.adapting else self._settings.round.train
        return needs_download(device, work, train, self._settings.method.evaluate)


def encoding_of(settings: ResolvedSettings, served: Mapping[str, Blob]) -> str:
    """Of what is handed in. A device that goes on from its own state shares nothing from which a change could be written."""
    encoding = settings.round.encoding
    return encoding if served or encoding not in RELATIVE else ""


def _founders(known: Mapping[str, Device], names: Iterable[str]) -> list[str]:
    return [name for name in names if name in known and known[name].founder]
