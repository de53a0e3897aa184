"""Orders of a learner: what a device must fetch for one, and the store of those that were carried out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
from typing_extensions import Self

from attune.common.errors import Forbidden, WireError
from attune.common.exchange.messages import BlobRef, Order
from attune.common.metrics import MOST_OTHERS
from attune.common.protocol import ENCODINGS, HAS_TORCH, RELATIVE
from attune.common.wire.blobs import Buffer, Readable
from attune.common.wire.digest import digest_of
from attune.common.wire.header import Manifest
from attune.fedclient.messages import OrderResult, Part, SmallerFormUnusable

if TYPE_CHECKING or HAS_TORCH:
    from attune.common.exchange.encodings import decoded
    from attune.common.wire.files import digest_of_tensors, tensor_bytes
    from attune.common.wire.tensors import manifest_of
if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
SECRET_BYTES = 32
ROWS, FEATURES = "row", "memory.features"  # tensors of a model that are training samples, or made of single ones
FITTED_BYTES = 512 << 20  # of fitted models that a process keeps in memory


class Holdings(msgspec.Struct, frozen=True):
    """Digests and manifests of what a device holds. Without tensors, so that a learner in another process can send them.

    Attributes:
        parts: Tensors of the blob of each part that is not private; PART/DEVICE is another device's value of it.
        has_rival: The device compares a common model with its own one.
        served: The digest of the held value of each part.
    """

    parts: Mapping[str, Manifest]
    has_rival: bool
    served: Mapping[str, str]

    def expected(self, part: str) -> Manifest:
        """Return the tensors that a blob of this part must hold.

        Raises:
            Forbidden: The part is private, or the method does not have it.
        """
        part = part.partition("/")[0]
        if part not in self.parts:
            raise Forbidden(f"the server asked for, or sent, the part {part[:40]!r}, which is private or not in this method")
        return self.parts[part]

    def cold_start(self, order: Order) -> tuple[BlobRef, ...]:
        """Return the common model of an order, if this device compares with it."""
        return tuple(ref for ref in order.cold_start if self.has_rival and "/" not in ref.part)

    def others(self, order: Order) -> dict[str, BlobRef]:
        """Return the networks of other devices that an order brings, by device: their parts are PART/DEVICE.

        Raises:
            Forbidden: They are more than a device evaluates.
        """
        refs = {ref.part.partition("/")[2]: ref for ref in order.cold_start if "/" in ref.part}
        if len(refs) > MOST_OTHERS:
            raise Forbidden(f"the server sent {len(refs)} networks of other devices, and this device evaluates {MOST_OTHERS}")
        return refs

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """Return the values of `order` that are not held, each once, and the tensors of each.

        A smaller form is named if this device can use it.

        Raises:
            Forbidden: The order has a part that is private, or that the method does not have.
        """
        refs = {ref.digest: ref for ref in (*self.others(order).values(), *self.cold_start(order), *order.downloads)}
        wanted = [(ref, self.expected(ref.part)) for ref in refs.values() if self.served.get(ref.part) != ref.digest]
        usable = [ref.sent.encoding in ENCODINGS and ref.base in ("", self.served.get(ref.part)) for ref, _ in wanted]
        return [(ref if use else ref.whole, expected) for use, (ref, expected) in zip(usable, wanted, strict=True)]


def manifests_of(part_of: Mapping[str, str], tensors: Tensors) -> dict[str, Manifest]:
    """Return the manifest of each part that is not private."""
    kinds = [kind for kind in dict.fromkeys(part_of.values()) if kind != "private"]
    return {kind: manifest_of({name: tensors[name] for name in part_of if part_of[name] == kind}) for kind in kinds}


def check_encodings(order: Order) -> None:
    """Check the encodings that an order asks for.

    Raises:
        WireError: One cannot be written, or needs a served value that the order does not have.
    """
    served = {ref.part for ref in order.downloads}
    for part, encoding in order.encodings.items():
        if encoding and encoding not in ENCODINGS:
            raise WireError(f"the server asks for parts written as {encoding[:40]!r}: update fedclient")
        if encoding in RELATIVE and part not in served:
            raise WireError(f"the server asks for {part} as {encoding}, a change from what it does not serve: update it")


def rebuilt(ref: BlobRef, expected: Manifest, fetched: Tensors, held: Tensors) -> Tensors:
    """Return the tensors of a part as they were served, down to the last bit.

    Args:
        ref: The reference of the part, with how it was sent.
        expected: Names and shapes that the value must have.
        fetched: The tensors of the blob `ref.sent`.
        held: The value of the part from which the blob may be the change.

    Raises:
        SmallerFormUnusable: The blob stands for another value, and the value itself can be fetched.
        WireError: The blob stands for another value, and the value itself cannot be fetched.
    """
    if not ref.sent.encoding:
        return fetched
    who = f"the part {ref.part} from the server"
    base = {name: tensor.detach().cpu() for name, tensor in held.items()} if ref.base else None
    try:
        value = dict(decoded(fetched, manifest_of(fetched), ref.sent.encoding, expected, base, who))
    except WireError as error:
        if ref.smaller is None:
            raise
        raise SmallerFormUnusable(str(error)) from error
    if ref.smaller is not None and digest_of_tensors(value) != ref.digest:
        raise SmallerFormUnusable(f"{who}, sent in fewer bytes, comes to other bytes than those of {ref.digest[:20]}")
    return value


class OrderStore(Protocol):
    """Store of the newest finished order of the device `who`, with its state. fedclient.work.state keeps it in a folder.

    Attributes:
        damage: A line for each damaged thing that was given up because there is an older order.
    """

    who: str
    damage: list[str]

    @property
    def model(self) -> Path | None:
        """Folder of the device's finished model; None: it is in memory."""

    @property
    def where(self) -> str:
        """Name of the store in errors."""

    def newest(self) -> OrderResult | None:
        """Return the result of the order that was committed last, or None.

        Raises:
            HomeMismatch: All stored orders are damaged.
        """

    def state(self, result: OrderResult) -> Tensors:
        """Return all tensors of the model after this order."""

    def beside(self, result: OrderResult, what: str) -> Tensors | None:
        """Return the tensors committed under this name beside the model's, or None."""

    def blob(self, order_id: str, part: str) -> Path | Readable:
        """Return the bytes of one part of the update."""

    def commit(
        self,
        result: OrderResult,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> OrderResult:
        """Keep everything or nothing, and return `result` with its parts.

        Args:
            result: The order's result.
            state: The tensors of the model.
            beside: Further sets of tensors that stay on the device, under names that no part has.
            parts: The tensors of each part to hand in.

        Raises:
            DiskFull: The disk has no room.
        """

    def secret(self) -> bytes:
        """Return 32 random bytes of this run that never leave the device, the same ones each time.

        Raises:
            DiskFull: The disk has no room.
        """

    def secure_state(self) -> bytes:
        """Return what was kept of secure aggregation in this run; empty: nothing."""

    def keep_secure_state(self, state: bytes) -> None:
        """Keep it durably in place of what was kept before.

        Raises:
            DiskFull: The disk has no room.
        """

    def adopt(self, other: Self) -> None:
        """Continue from what another process has made of a copy of this store."""

    def fitted(self, digest: str) -> Tensors | None:
        """Return the models that were fitted on the data with this digest, or None."""

    def keep_fitted(self, digest: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep models that were fitted on the data with this digest, in place of those of other data.

        Raises:
            DiskFull: The disk has no room.
        """


class FittedInMemory:
    """Fitted models of the last data, of all devices of this process: simulations of several methods have the same data."""

    def __init__(self) -> None:
        self._of: dict[str, Tensors] = {}  # by digest of the data, those used last at the end
        self._bytes = 0

    def get(self, digest: str) -> Tensors | None:
        """Return the models of these data, or None."""
        tensors = self._of.pop(digest, None)
        if tensors is not None:
            self._of[digest] = tensors
        return tensors

    def keep(self, digest: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep models, and forget those that were not used for longest until FITTED_BYTES are enough."""
        self._of[digest] = dict(tensors)
        self._bytes += _size(tensors)
        while self._bytes > FITTED_BYTES:
            self._bytes -= _size(self._of.pop(next(iter(self._of))))


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


_FITTED = FittedInMemory()


class MemoryOrders:
    """An OrderStore in memory.

    Tensors are kept as they are, because they are never changed in place. Only what is handed in becomes bytes.
    """

    model = None

    def __init__(self, who: str) -> None:
        self.who = who
        self.damage: list[str] = []
        self._newest: OrderResult | None = None
        self._state: Tensors = {}
        self._beside: dict[str, Tensors] = {}
        self._blobs: dict[str, bytes] = {}
        self._secure_state = b""
        self._secret = os.urandom(SECRET_BYTES)

    @property
    def where(self) -> str:
        return f"the memory of {self.who}"

    def newest(self) -> OrderResult | None:
        return self._newest

    def state(self, result: OrderResult) -> Tensors:
        return dict(self._state)

    def beside(self, result: OrderResult, what: str) -> Tensors | None:
        tensors = self._beside.get(what)
        return None if tensors is None else dict(tensors)

    def blob(self, order_id: str, part: str) -> Buffer:
        return Buffer(f"{self.who}'s {part}", self._blobs[part])

    def commit(
        self,
        result: OrderResult,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> OrderResult:
        blobs, handed_in = {}, []
        for name, tensors in parts.items():
            blobs[name] = data = tensor_bytes(tensors)
            handed_in.append(Part(name, digest_of(data), len(data), result.versions.get(name, 0)))
        bytes_up = sum(map(len, blobs.values()))
        self._newest = msgspec.structs.replace(result, parts=tuple(handed_in), bytes_up=bytes_up)
        self._state, self._beside = dict(state), {what: dict(tensors) for what, tensors in beside.items()}
        self._blobs = blobs
        return self._newest

    def secret(self) -> bytes:
        return self._secret

    def fitted(self, digest: str) -> Tensors | None:
        return _FITTED.get(digest)

    def keep_fitted(self, digest: str, tensors: Mapping[str, Tensor]) -> None:
        _FITTED.keep(digest, tensors)

    def secure_state(self) -> bytes:
        return self._secure_state

    def keep_secure_state(self, state: bytes) -> None:
        self._secure_state = state

    def adopt(self, other: MemoryOrders) -> None:
        """Continue from a copy, as OrderStore.adopt."""
        self._newest, self._state, self._beside, self._blobs = other._newest, other._state, other._beside, other._blobs
