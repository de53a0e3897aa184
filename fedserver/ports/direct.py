"""Port of a store of blobs that devices reach by themselves, with addresses that are signed for one blob and a short time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from attune.common.wire.blobs import Blob

LIFETIME_S = 60  # in which a transfer with a signed address must begin; a device asks again after that


@dataclass(frozen=True)
class DirectObject:
    """An object that a device writes in parts. Nothing can be written to it once it is complete or given up."""

    key: str
    upload: str


class DirectStore(Protocol):
    """The store. Several threads may use it. Its addresses are secrets: errors and logs never have them.

    Each call may raise LedgerBusy: the store cannot be used now.
    """

    @property
    def address(self) -> str:
        """Scheme and host of all signed addresses, such as https://s3.example."""

    def download_url(self, blob: Blob) -> str:
        """Return a signed address to read the blob; empty if its bytes are not in the store."""

    def begin(self, digest: str) -> DirectObject:
        """Begin an object."""

    def arrived(self, begun: DirectObject) -> set[int]:
        """Return the numbers of the parts that are whole in the store, from 1.

        Raises:
            KeyError: The object was given up.
        """

    def part_url(self, begun: DirectObject, number: int, size: int, digest: bytes) -> str:
        """Return a signed address to write one part: of exactly this size and SHA-256."""

    def complete(self, begun: DirectObject, digests: Sequence[bytes]) -> None:
        """Make one object of the parts, whose SHA-256 these are. From now on nobody can write to it.

        Raises:
            KeyError: The object was given up.
        """

    def pieces(self, begun: DirectObject) -> Iterator[memoryview]:
        """Yield the bytes of a complete object, as they are in the store."""

    def hold(self, blob: Blob, begun: DirectObject) -> None:
        """Remember that a sealed upload has its bytes in the store, so that `Blobs.keep` need not write them again."""

    def release(self, blob: Blob) -> None:
        """Forget it. The object goes, unless a name has it meanwhile."""

    def abandon(self, begun: DirectObject) -> None:
        """Give an object up, complete or not. Its signed addresses are void from now on."""

    def sweep(self) -> None:
        """Give up what earlier processes began and left, at start."""
