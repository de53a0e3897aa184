"""Files of tensors, written tensor by tensor in any order, and read one tensor at a time or all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from typing_extensions import Self

from attune.common.durable import replaced
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable, Target, hash_span
from attune.common.wire.digest import Digest, digest_of
from attune.common.wire.header import (
    ITEM_BYTES,
    LENGTH_BYTES,
    Limits,
    Opened,
    TensorSpec,
    check_spec,
    header_bytes,
    layout_in,
    layout_of,
)  # fmt: skip
from attune.common.wire.malformed import DigestMismatch, Malformed
from attune.common.wire.tensors import (
    DTYPES,
    Tensors,
    TensorSource,
    bytes_of,
    check_boolean,
    empty,
    manifest_of,
    spec_of,
    views,
)

__all__ = ["Blob", "Limits", "TensorFile", "TensorWriter", "digest_of_tensors", "read_tensors", "write_tensors"]


class TensorWriter:
    """Writer of a blob of tensors that keeps only one tensor in memory.

    Tensors that are put in the order of the file (`layout.manifest`) are hashed while they are written. The others are read
    again at close, so the order matters only for speed. As a context manager it closes on a clean exit, and aborts after an
    exception. A path is written under its final name. If readers must never see an unfinished file, use `write_tensors`, which
    renames.
    """

    def __init__(
        self, where: Path | Callable[[int], Target], manifest: Mapping[str, TensorSpec], *, durable: bool = False
    ) -> None:
        """Open the target and write the header.

        Args:
            where: A file's path, or a function that makes the target for a number of bytes.
            manifest: The tensors to come.
            durable: Only for a path: whether the file is on stable storage after `close`.

        Raises:
            DiskFull: The disk has no room.
            Malformed: As in layout_of.
        """
        self.layout = layout_of(manifest)
        self.blob: Blob | None = None
        self._left = set(self.layout.manifest)
        self._hash, self._hashed = Digest(), 0
        size = self.layout.size
        self._target: Target = LocalTarget(where, size, durable) if isinstance(where, Path) else where(size)
        self._name = self._target.name
        try:
            self._write(memoryview(self.layout.header), 0)
        except BaseException:
            self.abort()
            raise

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, from any processor.

        Raises:
            Malformed: unexpected-tensor, wrong-dtype, wrong-shape, put-twice or unsupported-tensor.
            DiskFull: The disk has no room.
        """
        expected = self.layout.manifest.get(name)
        if expected is None:
            raise Malformed("unexpected-tensor", f"{self._name}: {name!r} is not in the manifest of this file")
        check_spec(name, spec_of(name, tensor), expected, self._name)
        if name not in self._left:
            raise Malformed("put-twice", f"{self._name}: {name!r} was put before")
        self._write(bytes_of(tensor), self.layout.spans[name][0])
        self._left.remove(name)

    def close(self) -> Blob:
        """Finish and return the blob.

        Raises:
            Malformed: missing-tensor; the blob is removed.
            DiskFull: The disk has no room.
        """
        if self._left:
            self.abort()
            raise Malformed(
                "missing-tensor", f"{self._name}: {len(self._left)} tensors were not put, first {min(self._left)!r}"
            )
        hash_span(self._target.read_into, self._hashed, self.layout.size, self._hash)
        self.blob = self._target.finish(self._hash.text, self.layout.size)
        return self.blob

    def abort(self) -> None:
        """Remove the blob. No-op after `close`."""
        self._target.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self.blob is None:
            self.close()

    def _write(self, data: memoryview, offset: int) -> None:
        self._target.write(data, offset)
        if offset == self._hashed:
            self._hash.update(data)
            self._hashed += len(data)


def write_tensors(where: Path | Callable[[int], Target], tensors: Mapping[str, torch.Tensor], *, durable: bool = False) -> Blob:
    """Write all tensors as one blob, which appears under its name whole or not at all.

    Arguments and errors are those of TensorWriter.
    """
    if isinstance(where, Path):
        with replaced(where, durable) as beside:
            blob = _write_all(beside, tensors)
        return Blob(where.name, blob.digest, blob.size)
    return _write_all(where, tensors)


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the blob that `write_tensors` would make, in memory."""
    layout = layout_of(manifest_of(tensors))
    return b"".join([layout.header, *[bytes_of(tensors[name]) for name in layout.manifest]])


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of the blob that `write_tensors` would make."""
    layout, digest = layout_of(manifest_of(tensors)), Digest()
    digest.update(layout.header)
    for name in layout.manifest:
        digest.update(bytes_of(tensors[name]))
    return digest.text


def _write_all(where: Path | Callable[[int], Target], tensors: Mapping[str, torch.Tensor]) -> Blob:
    with TensorWriter(where, manifest_of(tensors)) as writer:
        for name in writer.layout.manifest:
            writer.put(name, tensors[name])
        return writer.close()


class TensorFile(Opened[torch.Tensor], TensorSource):
    """A blob of tensors, of which each access reads one, afresh. Iteration is in the order of the blob.

    Reads by position, not through a memory map, so resident memory is what is in use. Several threads may read.
    Owns its source. Errors: those of parse_header.
    """

    @property
    def stored(self) -> bool:
        return True

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a new tensor on the CPU.

        Raises:
            KeyError: There is no tensor of that name.
            Truncated: The source ends too early.
            Malformed: not-boolean.
        """
        spec = self._layout.manifest[name]
        tensor = empty(spec)
        self._fill(tensor.view(-1), name, 0)
        return tensor

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end) of a tensor in C order, flat. No other elements are read.

        Raises:
            KeyError, Truncated, Malformed: As in `__getitem__`.
        """
        tensor_N = torch.empty(end - start, dtype=DTYPES[self._layout.manifest[name].dtype])
        self._fill(tensor_N, name, start)
        return tensor_N

    def blocks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, elements) of a tensor in C order, flat, `count` at a time; the last block may be shorter.

        All blocks use one buffer: the next block overwrites the one before.

        Raises:
            KeyError, Truncated, Malformed: As in `__getitem__`.
        """
        spec = self._layout.manifest[name]
        size = math.prod(spec.shape)
        most = min(count, size)
        buffer_N = torch.empty(most, dtype=DTYPES[spec.dtype])
        for start in range(0, size, count):
            block_N = buffer_N if size - start >= most else buffer_N[: size - start]
            self._fill(block_N, name, start)
            yield start, block_N

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        """Read all elements of a tensor in C order into `out_N`, which is flat and has its dtype.

        Raises:
            KeyError, Truncated, Malformed: As in `__getitem__`; Malformed also if `out_N` does not fit.
        """
        spec = self.manifest[name]
        check_spec(name, spec_of(name, out_N), TensorSpec(spec.dtype, (math.prod(spec.shape),)), self._name)
        self._fill(out_N, name, 0)

    def _fill(self, tensor_N: torch.Tensor, name: str, start: int) -> None:
        if tensor_N.shape[0]:
            raw_B, spec = tensor_N.view(torch.uint8), self._layout.manifest[name]
            self._source.read_into(raw_B.numpy().data, self._layout.spans[name][0] + start * ITEM_BYTES[spec.dtype])
            if spec.dtype == "BOOL":
                check_boolean(name, spec, raw_B, self._name)


class OpenFiles(list[TensorFile]):
    """Files that are open during a block, and are closed at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self:
            file.close()


def read_tensors(where: Path | Readable, limits: Limits | None = None, digest: str | None = None) -> Tensors:
    """Return all tensors, as views of one buffer that is read at once. The blob must have this digest, if one is given.

    Errors are those of TensorFile, and:

    Raises:
        DigestMismatch: The bytes have another digest; the message names the file.
    """
    limits = limits or Limits()
    source = LocalFile(where) if isinstance(where, Path) else where
    try:
        header_bytes(source.read(0, LENGTH_BYTES), source.size, limits, source.name)
        buffer_B = torch.empty(source.size, dtype=torch.uint8)
        blob = buffer_B.numpy().data
        source.read_into(blob, 0)
    finally:
        source.close()
    if digest is not None and digest_of(blob) != digest:
        raise DigestMismatch(f"{source.name} is damaged: its bytes are not those that were written")
    return views(buffer_B, layout_in(blob, limits, source.name), source.name)
