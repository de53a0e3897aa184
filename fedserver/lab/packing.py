"""Smaller lossless forms of served values: the compressed value, or its delta from what was served before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from attune.common.exchange.encodings import encode
from attune.common.protocol import PACKED
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import file_name
from attune.common.wire.files import TensorFile
from attune.common.wire.tensors import Tensors
from attune.fedserver.core.records import Smaller
from attune.fedserver.ports.blobs import Blobs, Damaged


class Packing:
    """Maker of smaller forms. Each is made once; `write` stores its tensors under a name."""

    def __init__(self, blobs: Blobs, write: Callable[[str, Tensors], Blob]) -> None:
        self._blobs, self._write = blobs, write
        self._made: dict[tuple[str, str], Blob] = {}  # by the digests of the value and of its base

    def whole(self, blobs: Iterable[Blob]) -> dict[str, Blob]:
        """Return the compressed form of blobs, by digest, if it is smaller.

        Raises:
            Damaged: A blob's bytes are not the written ones.
        """
        return {blob.digest: packed for blob in blobs if (packed := self._packed(blob, None)).size < blob.size}

    def changes(self, renewed: Iterable[tuple[Blob, Blob]]) -> dict[str, Smaller]:
        """Return the deltas of pairs (a value, what it was before), if they are smaller. An unreadable value is no base."""
        smaller: dict[str, Smaller] = {}
        for blob, base in renewed:
            if blob.digest not in smaller and blob.digest != base.digest:
                with contextlib.suppress(Damaged):
                    packed = self._packed(blob, base)
                    if packed.size < blob.size:
                        smaller[blob.digest] = Smaller(packed, base.digest)
        return smaller

    def take(self) -> list[Blob]:
        """Return all blobs that were made. The caller removes them."""
        made, self._made = list(self._made.values()), {}
        return made

    def _packed(self, blob: Blob, base: Blob | None) -> Blob:
        key = blob.digest, base.digest if base else ""
        if key not in self._made:
            with ExitStack() as stack:
                older = stack.enter_context(TensorFile(self._blobs.open(base))) if base else None
                packed = encode(stack.enter_context(TensorFile(self._blobs.open(blob))), PACKED, older).tensors
            self._made[key] = self._write(".".join([*map(file_name, filter(None, key)), PACKED]), packed)
        return self._made[key]
