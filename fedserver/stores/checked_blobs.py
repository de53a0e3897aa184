"""The common part of the stores of blobs: each blob is checked once a process, and uploads are named alike."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator

from attune.common.errors import WireError
from attune.common.wire.blobs import Blob, Readable, digest_in
from attune.common.wire.digest import file_name, from_file_name
from attune.fedserver.ports.blobs import UPLOADS, Blobs, Damaged

SEALED = ".complete"  # ends the name of a sealed upload
OBJECTS = "blobs/"  # begins the keys of objects


class CheckedBlobs(Blobs):
    """A store that knows which blobs are whole: those that this process wrote or has compared with their digests."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # name -> digest

    @abstractmethod
    def source(self, name: str) -> Readable:
        """Open what a name holds, without a look at its digest.

        Raises:
            KeyError: It holds nothing.
        """

    def open(self, blob: Blob) -> Readable:
        source = self._opened(blob)
        if self._known.get(blob.name) != blob.digest:
            try:
                self._compare(source, blob)
            except BaseException:
                source.close()
                raise
        return source

    def check(self, blob: Blob) -> None:
        source = self._opened(blob)
        try:
            self._compare(source, blob)
        finally:
            source.close()

    def _opened(self, blob: Blob) -> Readable:
        try:
            return self.source(blob.name)
        except KeyError:
            raise Damaged(f"{blob.name} is missing: restore it from a backup", blob.name) from None

    def _compare(self, source: Readable, blob: Blob) -> None:
        self._known.pop(blob.name, None)
        try:
            digest = digest_in(source) if source.size == blob.size else None
        except WireError:
            digest = None
        if digest != blob.digest:
            raise Damaged(
                f"{source.name} is damaged, its bytes are not those that were written: restore it from a backup", blob.name
            )
        self._known[blob.name] = blob.digest


def new_key(digest: str) -> str:
    """Return the key of a new object for bytes with this digest."""
    return f"{OBJECTS}{file_name(digest)}.{secrets.token_hex(8)}"


def upload_name(sender: str, digest: str) -> str:
    """Return the name of an upload that grows."""
    return f"{UPLOADS}{sender}.{file_name(digest)}"


def sealed_among(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of sealed uploads, each with its digest."""
    for name in names:
        if name.endswith(SEALED):
            yield name, from_file_name(name.removesuffix(SEALED).rpartition(".")[2])
