"""A blob that was opened for reading: its checked header, and where its bytes come from (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from attune.common.wire.blobs import LocalFile, Readable
from attune.common.wire.header import LENGTH_BYTES, Layout, Limits, Manifest, header_bytes, parse_header


class Opened:
    """The names in a blob, in its order; what inherits from it reads the values. Owns its source. Errors: of parse_header."""

    def __init__(self, where: Path | Readable, limits: Limits | None = None) -> None:
        self._source: Readable = LocalFile(where) if isinstance(where, Path) else where
        self._name = self._source.name
        try:
            self._layout = self._read_layout(limits or Limits())
        except BaseException:
            self.close()
            raise

    def _read_layout(self, limits: Limits) -> Layout:
        size = self._source.size
        length = header_bytes(self._source.read(0, LENGTH_BYTES), size, limits, self._name)
        text = bytearray(length)
        self._source.read_into(memoryview(text), LENGTH_BYTES)
        return parse_header(bytes(text), size, limits, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, {len(self)} tensors, {self._layout.size} bytes)"

    @property
    def manifest(self) -> Manifest:
        return self._layout.manifest

    def __contains__(self, name: object) -> bool:
        return name in self.manifest  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest)

    def __len__(self) -> int:
        return len(self.manifest)

    def close(self) -> None:
        """Closing twice is allowed; reading afterwards raises OSError."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
