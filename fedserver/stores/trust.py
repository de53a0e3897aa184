"""Which blobs this process knows to be whole: those that it wrote itself, and those that it has held against their digests."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attune.common.errors import WireError
from attune.common.wire.blobs import Blob, Readable, digest_in
from attune.fedserver.ports.blobs import Damaged


class Trust(ABC):
    """What stores of blobs have in common: bytes are checked once a process."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # name -> digest

    @abstractmethod
    def _source(self, name: str) -> Readable:
        """Errors: KeyError."""

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
            return self._source(blob.name)
        except KeyError:
            raise Damaged(f"{blob.name} is missing: restore it from a backup", blob.name) from None

    def _compare(self, source: Readable, blob: Blob) -> None:
        self._known.pop(blob.name, None)
        try:
            found = digest_in(source) if source.size == blob.size else None
        except WireError:
            found = None
        if found != blob.digest:
            raise Damaged(
                f"{source.name} is damaged, its bytes are not those that were written: restore it from a backup", blob.name
            )
        self._known[blob.name] = blob.digest
