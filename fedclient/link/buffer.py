"""Receives a blob into memory: one preallocated buffer, hashed as it fills, of which the tensors are views."""

from __future__ import annotations

import torch

from attune.common.errors import LimitExceeded
from attune.common.wire.checks import check_manifest
from attune.common.wire.digest import Digest, check_digest
from attune.common.wire.header import Limits, Manifest, layout_in
from attune.common.wire.malformed import DigestMismatch, Truncated
from attune.common.wire.tensors import Tensors, views


class ReceiveBuffer:
    """An announced blob of `size` bytes on its way in.

    Errors: Malformed (bad-digest), LimitExceeded, before anything is allocated.
    The pages of the buffer are touched only as bytes arrive: a peer that announces much and sends little costs little.
    """

    def __init__(self, size: int, digest: str, max_bytes: int, who: str = "the peer") -> None:
        check_digest(digest, who)
        if not 0 <= size <= max_bytes:
            raise LimitExceeded(f"{who}: announced {size} bytes; at most {max_bytes} are allowed (server.max_blob_bytes)")
        self.size, self.digest, self.offset = size, digest, 0
        self._limits, self._who = Limits(max_blob_bytes=max_bytes), who
        self._hash = Digest()
        self._buffer_B = torch.empty(size, dtype=torch.uint8)
        self._bytes = self._buffer_B.numpy().data

    def __repr__(self) -> str:
        return f"ReceiveBuffer({self.offset}/{self.size} bytes of {self.digest[:12]} from {self._who})"

    def write(self, frame: bytes | memoryview) -> None:
        """The next bytes. Errors: LimitExceeded where they are more than announced; nothing of that frame is kept."""
        end = self.offset + len(frame)
        if end > self.size:
            raise LimitExceeded(f"{self._who}: sent {end} bytes after it had announced {self.size}")
        self._bytes[self.offset : end] = frame
        self._hash.update(frame)
        self.offset = end

    def finish(self, expected: Manifest | None = None) -> Tensors:
        """All tensors, as views into the one buffer, once digest, header and (if given) `expected` are checked.

        Errors: Truncated, DigestMismatch, and those of parse_header, check_manifest and views.
        """
        if self.offset < self.size:
            raise Truncated(f"{self._who}: {self.offset} of {self.size} bytes arrived; go on at offset {self.offset}")
        if self._hash.text != self.digest:
            raise DigestMismatch(f"{self._who}: the bytes are not those of {self.digest[:12]}; send them again")
        layout = layout_in(self._bytes, self._limits, self._who)
        if expected is not None:
            check_manifest(layout.manifest, expected, self._who)
        return views(self._buffer_B, layout, self._who)
