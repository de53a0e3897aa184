"""Immutable content that is known by its digest, and the spool in which uploads grow.

A `Blob` is content: digest and size, and a name that holds it. Content never changes, and is there as long as a name holds it;
several names may hold equal content. The first piece of a name says what the content is for, such as `state/` or `inbox/`. A
store may address content by digest and keep names in a table (`simulation.memory` does), or use names as file names
(`stores.folder` does). A name is given to content in one step, whole or not at all, and can be given to other content later.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from attune.common.errors import HomeMismatch
from attune.common.wire.blobs import Blob, Readable, Target
from attune.fedserver.core.records import Slot

T = TypeVar("T")
ATTEMPTS = 5  # of read_again
STATE, INBOX, UPLOADS, SERVED, REDO = "state/", "inbox/", "uploads/", "serve/", "redo/"
NOISE_SECRET = "privacy/noise-secret"  # noqa: S105 - a name; it belongs to the home, not to a run
MASKED_STATISTICS = "privacy/statistics.json"  # likewise
_OF_ROUND = re.compile(rf"{STATE}(?:.*\.)?(\d+)\.(?:safetensors|json)|{INBOX}(?:train|evaluate)-(\d+)-.*")


def blob_of(slot: Slot) -> Blob:
    """Return the content of a durable slot."""
    return Blob(f"{STATE}{slot.file}", slot.digest, slot.size)


def is_later(name: str, closed: int) -> bool:
    """Return whether a name belongs to a round after the one that follows `closed`."""
    match = _OF_ROUND.fullmatch(name)
    return match is not None and int(match[1] or match[2]) > closed + 1


class Damaged(HomeMismatch):
    """A file of the home is missing or has other bytes than were written.

    What to do: Restore the file that the message names.

    Attributes:
        name: The blob's name, if the damaged file is a blob.
    """

    kind, status = "damaged", "DATA_LOSS"

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def read_again(read: Callable[[], T]) -> T:
    """Return what `read` returns, tried again if a running server has removed files of an old state meanwhile.

    Raises:
        Damaged: The last attempt failed, too.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Damaged):
            return read()
    return read()


class Blobs(Protocol):
    """Content by digest. Several threads may use it. All that writes may raise DiskFull."""

    # --- put if absent: in pieces, at once, or what is here already

    def create(self, name: str, size: int, durable: bool = True) -> Target:
        """Return `size` bytes in the making. They get their name when they are finished, and are durable then if asked for."""

    def put(self, name: str, data: bytes) -> Blob:
        """Put a small blob, durably, and with it all names that `keep` gave before beside it."""

    def keep(self, blob: Blob, name: str) -> Blob:
        """Hold content by another name too, such as a sealed upload by the name of an accepted update.

        The bytes are durable when this returns, and the name with the next `put` beside it.

        Raises:
            Damaged: The content is missing, or was found to be another.
        """

    def sync(self, blob: Blob) -> None:
        """Make the bytes of a blob durable.

        Raises:
            Damaged: The content is missing.
        """

    # --- open

    def open(self, blob: Blob) -> Readable:
        """Open a blob. Its bytes are compared with the digest at the first time in a process.

        Raises:
            Damaged: The content is missing, or is another.
        """

    def check(self, blob: Blob) -> None:
        """Compare all bytes with the digest now.

        Raises:
            Damaged: The content is missing, or is another.
        """

    def get(self, name: str) -> bytes:
        """Return a small blob of which only the name is known.

        Raises:
            KeyError: The name holds nothing.
        """

    # --- list and remove

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin with `prefix`, sorted."""

    def remove(self, names: Sequence[str]) -> None:
        """Take names away, in this order; content goes with its last name. Whoever has it open goes on reading.

        Names that are not there are passed over.
        """

    def sweep(self) -> None:
        """Remove what a killed process has left unfinished, at start."""


class Growing(Protocol):
    """An upload on its way in, from the beginning to the end. Its bytes survive the end of the process.

    It cannot be open twice.
    """

    @property
    def name(self) -> str:
        """Its name in errors."""

    @property
    def size(self) -> int:
        """Number of bytes that are here."""

    def append(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            DiskFull: The disk is full; `size` is true even then.
        """

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset` on.

        Raises:
            Truncated: Fewer bytes are here.
        """

    def seal(self) -> Blob:
        """Close a whole upload, and return it as a blob that is not durable yet.

        Raises:
            DiskFull: The disk is full.
        """

    def remove(self) -> None:
        """Close the upload, and remove its bytes."""

    def close(self) -> None:
        """Close the upload. Its bytes stay. Closing twice is allowed."""


class Spool(Protocol):
    """Uploads on a disk of this machine, resumable. Several threads may use it.

    An upload is known by its sender (a path of names, such as `kiel/shared`) and by the digest that its bytes will have. The
    blobs of the same storage open, keep and remove a sealed upload like any other blob.
    """

    def grow(self, sender: str, digest: str, size: int) -> Growing:
        """Open an upload to append to it, at its end; a sealed one too.

        An upload that is longer than `size`, or was sealed with another size, begins anew.

        Raises:
            UploadBusy: It is open already.
            DiskFull: There is no space for what is missing.
        """

    def offset(self, sender: str, digest: str) -> int:
        """Return how many bytes of an upload are here."""

    def sealed(self, sender: str, digest: str) -> Blob | None:
        """Return a sealed upload."""

    def all_sealed(self) -> list[Blob]:
        """Return all sealed uploads."""

    def keep_only(self, sender: str, digest: str) -> None:
        """Remove all other uploads of this sender."""
