"""The open orders, the blobs that were offered to each device with its order, and the encodings in which parts travel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from attune.common.config import RoundSettings
from attune.common.errors import OrderClosed, SettingError, UnknownBlob, nearest
from attune.common.exchange.messages import BlobRef, Order, WorkName
from attune.common.exchange.registry import SECURE_SUM, SPOKEN_AS
from attune.common.exchange.transform import TransformSettings
from attune.common.methods.method import EvaluatedAs
from attune.common.protocol import ENCODINGS, EXTRAS, PACKED, PER_PART, RELATIVE
from attune.common.wire.blobs import Blob
from attune.fedserver.core.messages import OrderId, Record
from attune.fedserver.core.records import DeviceRecord, Smaller

MISSES = 2  # unused changes in a row after which a device is sent whole values; one may be due to a restart


class OrderBook:
    """Open orders, at most one for each device. A newer order replaces the old one and its offers."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._offers: dict[str, dict[str, Blob]] = {}
        self._fetched_whole: set[str] = set()  # devices that were offered a change and fetched the whole value instead
        self._misses: dict[str, int] = {}  # how many times in a row a device has done so

    def write(
        self, order: OrderId, blobs: Mapping[str, Blob], returns: Mapping[str, str], deadline_s: float, version: int,
        cold_start: Mapping[str, Blob] | None = None, trains: Sequence[str] = (), smaller: Mapping[str, Smaller] | None = None,
        changes: bool = False, prior: Mapping[str, float] | None = None, counted: Mapping[int, float] | None = None,
    ) -> Order:  # fmt: skip
        """Write and remember an order.

        Args:
            order: Its id.
            blobs: Values to start from, by part.
            returns: The encoding of each part to hand in; "" is none.
            deadline_s: Seconds that the device has.
            version: How many rounds were closed when the served state was made.
            cold_start: Values of the common model to compare with, by part, and of other devices' networks, by PART/DEVICE.
            trains: Kinds of tensors that training changes; empty: all.
            smaller: Compressed forms to send instead, by the digest of the value.
            changes: Whether the device accepts a compressed form under the digest of the value itself.
            prior: Shares of the models (core.prior).
            counted: The round of its last update that counted, and the weight of that round's updates.
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
            encodings={part: encoding for part, encoding in returns.items() if encoding},
            prior=prior or {},
            counted=counted or {},
        )
        return self._orders[order.client]

    def order(self, name: str, order_id: str) -> Order:
        """Return the open order that a device answers.

        Raises:
            OrderClosed: It is no longer open.
            UpdateRefused: It never was an order of this device.
        """
        order = self._orders.get(name)
        if order is not None and order.id == order_id:
            return order
        if str(OrderId.parse(order_id, name)) != (order.id if order else None) or order is None:
            raise OrderClosed(f"the order {order_id} is no longer open: throw its result away and wait for the next")
        return order

    def work(self, name: str) -> WorkName:
        """Return the work of this device's open order, which must exist: "train" or "evaluate"."""
        return self._orders[name].work

    def offer(self, name: str, digest: str) -> Blob:
        """Return a blob that a device asks for, and note whether it fetches a whole value instead of a change.

        Raises:
            UnknownBlob: It was not offered to this device.
        """
        blob = self.offered(name, digest)
        if any(ref.base and ref.digest == digest for ref in self._orders[name].downloads):
            self._fetched_whole.add(name)
        return blob

    def offered(self, name: str, digest: str) -> Blob:
        """Return a blob that was offered to this device.

        Raises:
            UnknownBlob: It was not offered to this device.
        """
        blob = self._offers.get(name, {}).get(digest)
        if blob is None:
            raise UnknownBlob(f"{name} was not offered a blob {digest[:20]!r}: ask for those of the present order")
        return blob

    def withdraw(self, holders: Collection[str] = ()) -> None:
        """Withdraw the blobs that were offered to all devices but `holders`, whose orders stay open.

        The files of closed orders may be removed from now on.
        """
        self._offers = {name: offers for name, offers in self._offers.items() if name in holders}

    def forgets(self, name: str) -> bool:
        """Return whether this device seems to keep nothing between orders, so that changes are of no use to it."""
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


def counted(record: Record, device: DeviceRecord | None) -> dict[int, float]:
    """Return the round of a device's last update that counted, with the weight of its updates, where devices need them."""
    number = device.contributed if device is not None else 0
    return {number: record.weights[number]} if number in record.weights else {}


def lacks_sums(record: Record, device: DeviceRecord | None) -> bool:
    """Return whether a device is to hand in sums over its samples with its next update.

    Sums do not change, so that is once; and again if the state with them was perhaps taken back.
    """
    last = device.contributed if device is not None else 0
    return not last or record.given_up_after < last <= record.given_up


def needs_download(device: DeviceRecord | None, work: str, train: Literal["sampled", "all"], evaluate: EvaluatedAs) -> bool:
    """Return whether an order starts from what the server serves, instead of from the device's own state.

    If all devices train, one outside the cohort continues from its own state until its next update counts. If a method is
    judged by its trained models, an evaluation is of the device's own model.
    """
    if device is None or device.fetched < 0:
        return True
    if work == "evaluate" and evaluate == "trained":
        return False
    return train == "sampled" or device.contributed > device.fetched


@dataclass(frozen=True)
class Encodings:
    """The encodings of one run.

    Attributes:
        handed_in: The encoding of each part that devices hand in; "" is none.
        packed: The parts that are served as PACKED.
    """

    handed_in: Mapping[str, str]
    packed: Sequence[str]
    transforms: Mapping[str, TransformSettings] = field(default_factory=dict)

    @property
    def on_devices(self) -> list[str]:
        """The transforms that devices must have."""
        return [name for name, settings in self.transforms.items() if settings.on_devices]

    def asked(self, part: str, served: bool) -> str:
        """Return the encoding that a device is asked to use for a part.

        A device that continues from its own state has no served value from which to send a change.
        """
        encoding = self.handed_in[part]
        return encoding if served or encoding not in RELATIVE else ""

    def check_here(self) -> None:
        """Check that this server has the packages for all encodings of the run.

        Raises:
            SettingError: A package is missing.
        """
        for setting, encoding in self._needed():
            if encoding not in ENCODINGS:
                raise SettingError(
                    f'{setting} = "{encoding}" needs the package {EXTRAS[encoding]}: install attune-fl[{encoding}]'
                )

    def check_device(self, name: str, known: Collection[str]) -> None:
        """Check that a device has all encodings of the run; `known` are those that it declares.

        Raises:
            SettingError: The device lacks an encoding.
        """
        for setting, encoding in self._needed():
            if encoding not in known:
                raise SettingError(
                    f"{name} cannot write parts as {encoding} ({setting} of this federation): update fedclient"
                    + (f", and install {EXTRAS[encoding]} beside it" if encoding in EXTRAS else "")
                )
        for transform in self.on_devices:
            if f"{SPOKEN_AS}{transform}" not in known:
                remedy = "update fedclient" if transform == SECURE_SUM else "install the package that offers it"
                raise SettingError(f"{name} does not have the transform {transform} of this federation: {remedy}")
        if len(set(self.handed_in.values())) > 1 and PER_PART not in known:
            raise SettingError(
                f"{name} cannot write each part in its own encoding (round.encodings of this federation): update fedclient"
            )

    def _needed(self) -> Iterable[tuple[str, str]]:
        """Return (the setting that asks for it, the encoding), each encoding once."""
        kinds = set(self.handed_in.values())
        asked = {encoding: "round.encoding" if len(kinds) == 1 else "round.encodings" for encoding in sorted(kinds) if encoding}
        if self.packed:
            asked.setdefault(PACKED, "round.served")
        return [(setting, encoding) for encoding, setting in asked.items()]


def encodings_of(
    settings: RoundSettings, parts: Iterable[str], transforms: Mapping[str, TransformSettings] | None = None
) -> Encodings:
    """Return the encodings and transforms of a run; `parts` are those of its method, private ones included.

    Raises:
        SettingError: The settings name a part that the method does not have.
    """
    travel = [part for part in parts if part != "private"]
    for part in settings.encodings:
        if part not in travel:
            raise SettingError(f"round.encodings.{part}: this method hands in no such part{nearest(part, travel)}")
    for name, transform in (transforms or {}).items():
        for part in transform.parts:
            if part not in travel:
                raise SettingError(f"transforms.{name}.parts: this method hands in no part {part!r}{nearest(part, travel)}")
    handed_in = {part: settings.encodings.get(part, settings.encoding) for part in travel}
    return Encodings(handed_in, [part for part in travel if PACKED in (handed_in[part], settings.served)], transforms or {})
