"""Tensor files: written tensor by tensor in any order, read lazily one at a time or all at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from attune.common.durable import disk_errors, replaced, sync_with_name
from attune.common.wire.blobs import Blob, check_space, hash_span, read_into, write_all
from attune.common.wire.checks import check_spec
from attune.common.wire.digest import Digest
from attune.common.wire.header import (
    LENGTH_BYTES,
    Layout,
    Limits,
    Manifest,
    TensorSpec,
    header_bytes,
    layout_in,
    layout_of,
    parse_header,
)
from attune.common.wire.malformed import Malformed
from attune.common.wire.tensors import Tensors, bytes_of, check_boolean, empty, manifest_of, spec_of, views

__all__ = ["Blob", "Limits", "TensorFile", "TensorWriter", "read_tensors", "write_tensors"]


class TensorWriter:
    """Writes a file of tensors; only the current tensor is in memory.

    Tensors put in the order of the file (`layout.manifest`) are hashed on their way; the rest is read again at close, so
    that order is a matter of speed only. As a context manager it closes on a clean exit, and removes the file if an exception
    leaves it. Where the name must never show an unfinished file, write beside it and rename (write_tensors does).
    Errors: DiskFull, up front and later; those of layout_of.
    """

    def __init__(self, path: Path, manifest: Mapping[str, TensorSpec]) -> None:
        self.path, self.layout = path, layout_of(manifest)
        self.blob: Blob | None = None
        self._left = set(self.layout.manifest)
        self._hash, self._hashed = Digest(), 0
        check_space(path, self.layout.size)
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._write(memoryview(self.layout.header), 0)
        except BaseException:
            self.abort()
            raise

    def __repr__(self) -> str:
        return f"TensorWriter({self.path}, {len(self._left)} of {len(self.layout.manifest)} tensors to come)"

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor, from any device.

        Errors: Malformed (unexpected-tensor, wrong-dtype, wrong-shape, put-twice, unsupported-tensor), DiskFull.
        """
        expected = self.layout.manifest.get(name)
        if expected is None:
            raise Malformed("unexpected-tensor", f"{self.path}: {name!r} is not in the manifest of this file")
        check_spec(name, spec_of(name, tensor), expected, str(self.path))
        if name not in self._left:
            raise Malformed("put-twice", f"{self.path}: {name!r} was put before")
        self._write(bytes_of(tensor), self.layout.spans[name][0])
        self._left.remove(name)

    def close(self, durable: bool = False) -> Blob:
        """The finished file; on stable storage, with its name, if `durable`.

        Errors: Malformed (missing-tensor; the file is removed), DiskFull.
        """
        if self._left:
            self.abort()
            raise Malformed("missing-tensor", f"{self.path}: {len(self._left)} tensors were not put, first {min(self._left)!r}")
        with disk_errors(self.path):
            hash_span(self._fd, self._hashed, self.layout.size, self._hash, str(self.path))
            if durable:
                sync_with_name(self.path)
        self._release()
        self.blob = Blob(self.path, self._hash.text, self.layout.size)
        return self.blob

    def abort(self) -> None:
        """Gives the file up and removes it; nothing happens once it is closed."""
        if self._fd >= 0:
            self._release()
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._fd >= 0:
            self.close()

    def _write(self, data: memoryview, offset: int) -> None:
        with disk_errors(self.path):
            for _ in write_all(self._fd, data, offset):
                pass
        if offset == self._hashed:
            self._hash.update(data)
            self._hashed += len(data)

    def _release(self) -> None:
        os.close(self._fd)
        self._fd = -1


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, durable: bool = False) -> Blob:
    """All tensors as one file, which appears under its name whole or not at all. Errors: as TensorWriter."""
    with replaced(path, durable) as beside, TensorWriter(beside, manifest_of(tensors)) as writer:
        for name in writer.layout.manifest:
            writer.put(name, tensors[name])
        blob = writer.close()
    return Blob(path, blob.digest, blob.size)


class TensorFile(Mapping[str, torch.Tensor]):
    """A file of tensors, of which each access reads one, afresh. Iteration is in the order of the file.

    Reads by position, not through a memory map: a file that shrinks underneath is an error (Truncated) instead of a crash,
    and resident memory is what is in use. Several threads may read. Errors: those of parse_header.
    """

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.path, self._who = path, str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._layout = self._read_layout(limits)
        except BaseException:
            self.close()
            raise

    def _read_layout(self, limits: Limits) -> Layout:
        size = os.fstat(self._fd).st_size
        length = header_bytes(os.pread(self._fd, LENGTH_BYTES, 0), size, limits, self._who)
        text = bytearray(length)
        read_into(self._fd, memoryview(text), LENGTH_BYTES, self._who)
        return parse_header(bytes(text), size, limits, self._who)

    def __repr__(self) -> str:
        return f"TensorFile({self.path}, {len(self)} tensors, {self._layout.size} bytes)"

    @property
    def manifest(self) -> Manifest:
        return self._layout.manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        """A new tensor on the CPU. Errors: KeyError, Truncated, Malformed (not-boolean)."""
        spec = self.manifest[name]
        tensor = empty(spec)
        if tensor.numel():
            raw_B = tensor.view(-1).view(torch.uint8)
            read_into(self._fd, raw_B.numpy().data, self._layout.spans[name][0], self._who)
            check_boolean(name, spec, raw_B, self._who)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.manifest  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest)

    def __len__(self) -> int:
        return len(self.manifest)

    def close(self) -> None:
        """Closing twice is allowed; reading afterwards raises OSError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def read_tensors(path: Path, limits: Limits | None = None) -> Tensors:
    """Everything, in one read into one buffer of which the tensors are views. Errors: as TensorFile."""
    limits = limits or Limits()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        header_bytes(os.pread(fd, LENGTH_BYTES, 0), size, limits, str(path))
        buffer_B = torch.empty(size, dtype=torch.uint8)
        blob = buffer_B.numpy().data
        read_into(fd, blob, 0, str(path))
    finally:
        os.close(fd)
    return views(buffer_B, layout_in(blob, limits, str(path)), str(path))
