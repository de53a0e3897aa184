"""What a device must fetch for an order, by what it holds already: pure, so that it is known where the tensors are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attune.common.errors import Forbidden
from attune.common.exchange.messages import BlobRef, Order
from attune.common.protocol import ENCODINGS
from attune.common.wire.header import Manifest


@dataclass(frozen=True)
class Holdings:
    """parts: of each part that is not private, what a blob of it must hold. has_rival: whether a common model is compared with
    the own one. served: the digest of what is held of each part."""

    parts: Mapping[str, Manifest]
    has_rival: bool
    served: Mapping[str, str]

    def expected(self, part: str) -> Manifest:
        """What a blob of this part must hold. Errors: Forbidden for a private part, or one that this method does not have."""
        if part not in self.parts:
            raise Forbidden(f"the server asked for, or sent, the part {part[:40]!r}, which is private or not in this method")
        return self.parts[part]

    def cold_start(self, order: Order) -> tuple[BlobRef, ...]:
        """The common model of an order, if this device compares with it."""
        return order.cold_start if self.has_rival else ()

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """The values of `order` that are not held, each once, and the tensors that each must hold. Errors: Forbidden.

        What is sent in the place of one is named where it can be used here.
        """
        refs = {ref.digest: ref for ref in (*self.cold_start(order), *order.downloads)}
        wanted = [(ref, self.expected(ref.part)) for ref in refs.values() if self.served.get(ref.part) != ref.digest]
        return [(ref if self._can_use(ref) else ref.whole, expected) for ref, expected in wanted]

    def _can_use(self, ref: BlobRef) -> bool:
        return ref.sent.encoding in ENCODINGS and ref.base in ("", self.served.get(ref.part))
