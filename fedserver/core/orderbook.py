"""Which orders are out, and which blobs each device was offered with its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attune.common.errors import OrderClosed, UnknownBlob
from attune.common.methods.method import Evaluate
from attune.common.protocol import PACKED
from attune.common.wire.blobs import Blob
from attune.fedserver.core.messages import BlobRef, Order, OrderId
from attune.fedserver.core.records import Device


class OrderBook:
    """One open order a device at most; a newer one replaces it and its offers."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._offers: dict[str, dict[str, Blob]] = {}

    def write(
        self,
        order: OrderId,
        blobs: Mapping[str, Blob],
        returns: Sequence[str],
        deadline_s: float,
        version: int,
        cold_start: Mapping[str, Blob] | None = None,
        trains: Sequence[str] = (),
        encoding: str = "",
        packed: Mapping[str, Blob] | None = None,
    ) -> Order:
        """The order as it is sent: `blobs` by part to start from, `returns` the parts to hand in, `cold_start` to compare with.

        version: how many rounds were closed when the state was made that they are of. trains: the kinds of tensors that move in
        training; none named: all. encoding: of what is handed in. packed: by the digest of a blob, what is sent in its place.
        """
        compared, smaller = cold_start or {}, packed or {}
        sent = [smaller.get(blob.digest, blob) for blob in (*blobs.values(), *compared.values())]
        self._offers[order.client] = {blob.digest: blob for blob in sent}
        self._orders[order.client] = Order(
            id=order,
            deadline_s=deadline_s,
            downloads=_refs(blobs, version, smaller),
            returns=tuple(returns),
            trains=tuple(trains),
            cold_start=_refs(compared, version, smaller),
            encoding=encoding,
        )
        return self._orders[order.client]

    def order(self, name: str, order_id: str) -> Order:
        """The open order that a device answers. Errors: OrderClosed if it is open no longer, UpdateRefused if it never was."""
        asked = OrderId.parse(order_id, name)
        order = self._orders.get(name)
        if order is None or order.id != asked:
            raise OrderClosed(f"the order {order_id} is no longer open: throw its result away and wait for the next")
        return order

    def work(self, name: str) -> str:
        """What this device's open order, which there must be, tells it to do: "train" or "evaluate"."""
        return self._orders[name].id.work

    def offer(self, name: str, digest: str) -> Blob:
        """A blob that this device was offered. Errors: UnknownBlob, also for another device's."""
        blob = self._offers.get(name, {}).get(digest)
        if blob is None:
            raise UnknownBlob(f"{name} was not offered a blob {digest[:20]!r}: ask for those of the present order")
        return blob


def _refs(blobs: Mapping[str, Blob], version: int, packed: Mapping[str, Blob]) -> tuple[BlobRef, ...]:
    refs = []
    for part, blob in sorted(blobs.items()):
        sent, encoding = (packed[blob.digest], PACKED) if blob.digest in packed else (blob, "")
        refs.append(BlobRef(part, sent.digest, sent.size, version, encoding))
    return tuple(refs)


def needs_download(device: Device | None, work: str, train: Literal["sampled", "all"], evaluate: Evaluate) -> bool:
    """Whether an order starts from what the server serves, or from what the device has.

    Where all devices train, one that is not in the cohort goes on from its own state until its next update was answered;
    where a method is judged by its trained models, an evaluation is of the device's own.
    """
    if device is None or device.fetched < 0:
        return True
    if work == "evaluate" and evaluate == "trained":
        return False
    return train == "sampled" or device.contributed > device.fetched
