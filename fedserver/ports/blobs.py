"""Named, immutable bytes with a digest: state, inbox, uploads and what is served.

Names are paths with "/", such as `inbox/train-3-kiel/shared.safetensors`; the first piece says what the blob is for. A blob
appears under its name by one step, whole or not at all, and is never changed; a name can be given to another blob.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from attune.common.errors import HomeMismatch
from attune.common.wire.blobs import Blob, Readable, Target
from attune.fedserver.core.records import Slot

STATE, INBOX, UPLOADS, SERVED, REDO = "state/", "inbox/", "uploads/", "serve/", "redo/"


def blob_of(slot: Slot) -> Blob:
    """Where a durable slot lies."""
    return Blob(f"{STATE}{slot.file}", slot.digest, slot.size)


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


class Growing(Protocol):
    """Bytes on their way in, from the beginning to the end. What is there survives the end of the process.

    Nobody else can have the same name open meanwhile.
    """

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def size(self) -> int:
        """How many bytes are there."""
        ...

    def append(self, data: memoryview) -> None:
        """Errors: DiskFull; `size` is true even then."""
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Errors: Truncated."""
        ...

    def seal(self, name: str, digest: str) -> Blob:
        """All bytes are there: a blob under its final name. Closes. Errors: DiskFull."""
        ...

    def remove(self) -> None:
        """Nothing stays. Closes."""
        ...

    def close(self) -> None:
        """Lets go of the bytes, which stay. Closing twice is allowed."""
        ...


class Blobs(Protocol):
    """Several threads may use it. Errors of all that write: DiskFull."""

    def create(self, name: str, size: int, durable: bool = True) -> Target:
        """A blob of `size` bytes in the making, which takes its name when it is finished; then it is durable, if asked for."""
        ...

    def put(self, name: str, data: bytes) -> Blob:
        """A small blob, durable in one step, and with it all that was moved beside it before."""
        ...

    def grow(self, name: str, size: int) -> Growing:
        """What is there under this name, to be gone on with up to `size` bytes.

        What is longer begins anew. Errors: UploadBusy, DiskFull up front.
        """
        ...

    def open(self, blob: Blob) -> Readable:
        """Its bytes. At the first time in a process they are held against the digest. Errors: Damaged."""
        ...

    def check(self, blob: Blob) -> None:
        """Holds all bytes against the digest now. Errors: Damaged."""
        ...

    def get(self, name: str) -> bytes:
        """A small blob of which only the name is known. Errors: KeyError."""
        ...

    def size(self, name: str) -> int | None:
        """Of what is there under this name, whole or growing; None: nothing."""
        ...

    def names(self, prefix: str) -> list[str]:
        """All that begin so, sorted."""
        ...

    def move(self, blob: Blob, name: str) -> Blob:
        """Another name for a blob, in place of the old one. Durable with the next `put` beside it. Errors: Damaged."""
        ...

    def sync(self, blob: Blob) -> None:
        """Its bytes are durable from now on. Errors: Damaged, DiskFull."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """In this order. What is not there is passed over. Who has one open goes on reading it."""
        ...

    def path(self, blob: Blob) -> Path | None:
        """Where it lies as a file on this machine, if it does: for memory maps and copies."""
        ...

    def sweep(self) -> None:
        """At start: what a killed process has left unfinished goes."""
        ...
