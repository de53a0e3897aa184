"""Values that a device holds and must fetch for an order, and the value that a compressed blob stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attune.common.errors import Forbidden, WireError
from attune.common.exchange.encodings import decoded
from attune.common.exchange.messages import BlobRef, Order
from attune.common.protocol import ENCODINGS, RELATIVE
from attune.common.wire.files import digest_of_tensors
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import Tensors, manifest_of
from attune.fedclient.messages import SmallerFormUnusable


@dataclass(frozen=True)
class Holdings:
    """Digests and manifests of what a device holds. Without tensors, so that a learner in another process can send them.

    Attributes:
        parts: Tensors of the blob of each part that is not private.
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
        if part not in self.parts:
            raise Forbidden(f"the server asked for, or sent, the part {part[:40]!r}, which is private or not in this method")
        return self.parts[part]

    def cold_start(self, order: Order) -> tuple[BlobRef, ...]:
        """Return the common model of an order, if this device compares with it."""
        return order.cold_start if self.has_rival else ()

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """Return the values of `order` that are not held, each once, and the tensors of each.

        A smaller form is named if this device can use it.

        Raises:
            Forbidden: The order has a part that is private, or that the method does not have.
        """
        refs = {ref.digest: ref for ref in (*self.cold_start(order), *order.downloads)}
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
