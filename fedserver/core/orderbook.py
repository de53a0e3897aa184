"""Which orders are out, and which blobs each device was offered with its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attune.common.errors import OrderClosed, UnknownBlob
from attune.common.methods.method import Evaluate
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.blobs import Blob
from attune.fedserver.core.orders import OrderId
from attune.fedserver.stores.sqlite import Device

WORK = {"train": pb.WORK_TRAIN, "evaluate": pb.WORK_EVALUATE}


class OrderBook:
    """One open order a device at most; a newer one replaces it and its offers."""

    def __init__(self) -> None:
        self._orders: dict[str, pb.Order] = {}
        self._offers: dict[str, dict[str, Blob]] = {}

    def write(
        self,
        order: OrderId,
        blobs: Mapping[str, Blob],
        returns: Sequence[str],
        deadline_s: float,
        common: Mapping[str, Blob] | None = None,
        trains: Sequence[str] = (),
    ) -> pb.Order:
        """The order as it is sent: `blobs` by part to start from, `returns` the parts to hand in, `common` to compare with.

        trains: the kinds of tensors that move in training; none named: all.
        """
        compared = common or {}
        self._offers[order.client] = {blob.digest: blob for blob in (*blobs.values(), *compared.values())}
        self._orders[order.client] = pb.Order(
            id=str(order),
            round=order.round,
            work=WORK[order.work],
            downloads=_refs(blobs),
            returns=returns,
            deadline_s=deadline_s,
            trains=trains,
            common=_refs(compared),
        )
        return self._orders[order.client]

    def order(self, name: str, order_id: str) -> pb.Order:
        """The open order that a device answers. Errors: OrderClosed if it is open no longer, UpdateRefused if it never was."""
        OrderId.parse(order_id, name)
        order = self._orders.get(name)
        if order is None or order.id != order_id:
            raise OrderClosed(f"the order {order_id} is no longer open: throw its result away and wait for the next")
        return order

    def offer(self, name: str, digest: str) -> Blob:
        """A blob that this device was offered. Errors: UnknownBlob, also for what is another device's."""
        blob = self._offers.get(name, {}).get(digest)
        if blob is None:
            raise UnknownBlob(f"{name} was not offered a blob {digest[:12]!r}: ask for those of the present order")
        return blob


def _refs(blobs: Mapping[str, Blob]) -> list[pb.BlobRef]:
    return [pb.BlobRef(part=part, digest=blob.digest, size=blob.size) for part, blob in sorted(blobs.items())]


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
