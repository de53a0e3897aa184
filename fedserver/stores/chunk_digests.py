"""Digests of the chunks of a blob: with them a range of an object is checked without the rest.

They are computed in one pass with the digest of the whole, so they belong to the same bytes. A process keeps them in memory
for the objects that it wrote or compared: 32 bytes for each 64 KiB.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from attune.common.wire.blobs import Blob, LocalFile, Readable
from attune.common.wire.digest import Digest
from attune.fedserver.ports.blobs import Damaged

CHUNK_BYTES = 1 << 16
_DIGEST_BYTES = hashlib.sha256().digest_size


def digests_in(source: Readable) -> tuple[str, bytes]:
    """Return the digest of all bytes of a source, and the SHA-256 of each chunk, one after the other.

    Raises:
        Truncated: The source ends too early.
    """
    whole, chunks = Digest(), bytearray()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, source.size)))
    for start in range(0, source.size, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, source.size - start)]
        source.read_into(chunk, start)
        whole.update(chunk)
        chunks += hashlib.sha256(chunk).digest()
    return whole.text, bytes(chunks)


def chunks_of(path: Path, blob: Blob) -> bytes:
    """Return the SHA-256 of each chunk of a file that holds a blob.

    Raises:
        Damaged: It has other bytes by now.
    """
    with LocalFile(path, blob.name) as source:
        digest, chunks = digests_in(source)
    if digest != blob.digest:
        raise Damaged(f"{blob.name} is damaged on this machine: its bytes are not those that were written", blob.name)
    return chunks


def chunks_around(start: int, end: int, size: int) -> tuple[int, int]:
    """Return where the chunks begin and end that have the bytes [start, end) of a blob of `size` bytes."""
    return start // CHUNK_BYTES * CHUNK_BYTES, min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, size)


def fits(data: memoryview, start: int, chunks: bytes) -> bool:
    """Return whether `data`, which begins at the chunk boundary `start`, has the bytes that these digests are of."""
    first = start // CHUNK_BYTES
    expected = memoryview(chunks)[first * _DIGEST_BYTES :]
    return all(
        hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() == expected[number * _DIGEST_BYTES :][:_DIGEST_BYTES]
        for number, at in enumerate(range(0, len(data), CHUNK_BYTES))
    )
