"""Digest that identifies a blob, ALGORITHM:HEX. It names its algorithm, so that a later version can use another one."""

from __future__ import annotations

import hashlib
import re

import msgspec

from attune.common.wire.malformed import Malformed

ALGORITHM = "sha256"
_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")


class Digest:
    """Digest of bytes that arrive piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        self._hash.update(data)

    @property
    def text(self) -> str:
        """Digest of all bytes so far."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of these bytes."""
    return f"{ALGORITHM}:{hashlib.sha256(data).hexdigest()}"


def check_of(text: bytes) -> str:
    """Return the digest of a JSON object without its field `check`, in which it is kept.

    Another version may know other fields, so the text decides, and not the object that this version reads from it.
    """
    return digest_of(msgspec.json.encode(msgspec.json.decode(text) | {"check": ""}))


def check_digest(digest: str, who: str) -> None:
    """Check the form of a peer's digest. It becomes part of file names, so it is checked before anything else.

    Raises:
        Malformed: bad-digest.
    """
    if not _DIGEST.fullmatch(digest):
        raise Malformed("bad-digest", f"{who}: {digest[:80]!a} is not {ALGORITHM}: and 64 lower-case hexadecimal digits")


def file_name(digest: str) -> str:
    """Return a checked digest as part of a file name. Some file systems do not allow colons."""
    return digest.replace(":", "-")


def from_file_name(name: str) -> str:
    """Return the digest that `file_name` was given."""
    return name.replace("-", ":", 1)
