"""The digest by which a blob is known, ALGORITHM:HEX: the name of the algorithm travels with it, so that another can follow."""

from __future__ import annotations

import hashlib
import re

from attune.common.wire.malformed import Malformed

ALGORITHM = "sha256"
_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")


class Digest:
    """Of bytes that come one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        self._hash.update(data)

    @property
    def text(self) -> str:
        """Of all bytes so far."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Of bytes that are all there."""
    return f"{ALGORITHM}:{hashlib.sha256(data).hexdigest()}"


def check_digest(digest: str, who: str) -> None:
    """Errors: Malformed (bad-digest). A digest becomes part of file names, so a peer's is checked before anything else."""
    if not _DIGEST.fullmatch(digest):
        raise Malformed("bad-digest", f"{who}: {digest[:80]!a} is not {ALGORITHM}: and 64 lower-case hexadecimal digits")


def file_name(digest: str) -> str:
    """A checked digest as part of a file name; a colon is not allowed in one everywhere."""
    return digest.replace(":", "-")


def from_file_name(name: str) -> str:
    """What `file_name` was given."""
    return name.replace("-", ":", 1)
