"""Which orders are out, and which blobs each device was offered with its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from attune.common.errors import OrderClosed, UnknownBlob
from attune.common.exchange.messages import BlobRef, Order, WorkName
from attune.common.methods.method import Evaluate
from attune.common.metrics import Choice
from attune.common.protocol import PACKED
from attune.common.wire.blobs import Blob
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import DeviceRecord, Smaller

MISSES = 2  # changes in a row that a device had no use for; after one it may have been started again


class OrderBook:
    """One open order a device at most; a newer one replaces it and its offers."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._offers: dict[str, dict[str, Blob]] = {}
        self._fetched_whole: set[str] = set()  # whoever was offered a change with its present order, and took the value instead
        self._misses: dict[str, int] = {}  # of whom this is known of so many orders in a row that offered a change

    def write(
        self,
        order: OrderId,
        blobs: Mapping[str, Blob],
        returns: Sequence[str],
        deadline_s: float,
        version: int,
        cold_start: Mapping[str, Blob] | None = None,
        trains: Sequence[str] = (),
        encodings: Mapping[str, str] | None = None,
        smaller: Mapping[str, Smaller] | None = None,
        changes: bool = False,
        prior: Mapping[Choice, float] | None = None,
    ) -> Order:
        """The order as it is sent: `blobs` by part to start from, `returns` the parts to hand in, `cold_start` to compare with.

        version: how many rounds were closed when the state was made that they are of. trains: the kinds of tensors that move in
        training; none named: all. encodings: of what is handed in, by part. smaller: by the digest of a blob, what is sent in
        its place. changes: whether the device knows a value by its own digest, whatever is sent in its place. prior: as of
        core.prior.
        """
        self._learn_from_last(order.client)
        compared, instead = cold_start or {}, smaller or {}
        whole = (*blobs.values(), *compared.values())
        sent = [instead[blob.digest].blob for blob in whole if blob.digest in instead]
        self._offers[order.client] = {blob.digest: blob for blob in (*whole, *sent)}
        self._orders[order.client] = Order(
            id=str(order),
            round=order.round,
            work=order.work,
            deadline_s=deadline_s,
            downloads=_refs(blobs, version, instead, changes),
            returns=tuple(returns),
            trains=tuple(trains),
            cold_start=_refs(compared, version, instead, changes),
            encodings=encodings or {},
            prior=prior or {},
        )
        return self._orders[order.client]

    def order(self, name: str, order_id: str) -> Order:
        """The open order that a device answers. Errors: OrderClosed if it is open no longer, UpdateRefused if it never was."""
        asked, order = OrderId.parse(order_id, name), self._orders.get(name)
        if order is None or order.id != str(asked):
            raise OrderClosed(f"the order {order_id} is no longer open: throw its result away and wait for the next")
        return order

    def work(self, name: str) -> WorkName:
        """What this device's open order, which there must be, tells it to do: "train" or "evaluate"."""
        return self._orders[name].work

    def offer(self, name: str, digest: str) -> Blob:
        """A blob that this device was offered, and asks for. Errors: UnknownBlob, also for another device's."""
        blob = self.offered(name, digest)
        if any(ref.base and ref.digest == digest for ref in self._orders[name].downloads):
            self._fetched_whole.add(name)
        return blob

    def offered(self, name: str, digest: str) -> Blob:
        """A blob that goes to this device with its order. Errors: as `offer`."""
        blob = self._offers.get(name, {}).get(digest)
        if blob is None:
            raise UnknownBlob(f"{name} was not offered a blob {digest[:20]!r}: ask for those of the present order")
        return blob

    def forgets(self, name: str) -> bool:
        """Whether this device seems to hold nothing from one order to the next: then changes are of no use to it."""
        return self._misses.get(name, 0) >= MISSES

    def _learn_from_last(self, name: str) -> None:
        last = self._orders.get(name)
        if last is not None and any(ref.base for ref in last.downloads):
            self._misses[name] = self._misses.get(name, 0) + 1 if name in self._fetched_whole else 0
        self._fetched_whole.discard(name)


def _refs(blobs: Mapping[str, Blob], version: int, instead: Mapping[str, Smaller], changes: bool) -> tuple[BlobRef, ...]:
    refs = []
    for part, blob in sorted(blobs.items()):
        ref, sent = BlobRef(part, blob.digest, blob.size, version), instead.get(blob.digest)
        if sent is not None:
            smaller = BlobRef(part, sent.blob.digest, sent.blob.size, version, PACKED)
            ref = replace(ref, smaller=smaller, base=sent.base) if changes else smaller
        refs.append(ref)
    return tuple(refs)


def needs_download(device: DeviceRecord | None, work: str, train: Literal["sampled", "all"], evaluate: Evaluate) -> bool:
    """Whether an order starts from what the server serves, or from what the device has.

    Where all devices train, one that is not in the cohort goes on from its own state until its next update was answered;
    where a method is judged by its trained models, an evaluation is of the device's own.
    """
    if device is None or device.fetched < 0:
        return True
    if work == "evaluate" and evaluate == "trained":
        return False
    return train == "sampled" or device.contributed > device.fetched
