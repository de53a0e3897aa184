"""Blobs of tensors for a light device: an installation without torch reads and writes them as arrays of NumPy, all float64.

Its names are those of `tensors` and `files`, in whose place a light device imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attune.common.durable import PUBLIC, write_file
from attune.common.protocol import HAS_TORCH
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of
from attune.common.wire.header import Layout, Limits, TensorSpec, layout_in, layout_of
from attune.common.wire.malformed import DigestMismatch, Malformed

if TYPE_CHECKING:
    import torch


def as_tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor of torch in the same memory; without torch as it is."""
    if not HAS_TORCH:
        return values  # type: ignore[return-value]  # a light device reads it as an array
    import torch

    return torch.from_numpy(values)


def room(size: int) -> npt.NDArray[np.uint8]:
    """Return a buffer of so many bytes, whose values are not set."""
    return np.empty(size, dtype=np.uint8)


def views(buffer_B: npt.NDArray[np.uint8], layout: Layout, who: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the tensors of a whole blob as views into its bytes, (B,) uint8.

    Raises:
        Malformed: unsupported-tensor: one is not float64.
    """
    if other := [name for name, spec in layout.manifest.items() if spec.dtype != "F64"]:
        raise Malformed("unsupported-tensor", f"{who}: {other[0]!r} is not F64, and a light device reads no other numbers")
    spans = layout.spans
    return {name: buffer_B[slice(*spans[name])].view("<f8").reshape(spec.shape) for name, spec in layout.manifest.items()}


def read_tensors(where: Path, digest: str | None = None) -> dict[str, npt.NDArray[np.float64]]:
    """Return all tensors of a file, which must have this digest, if one is given.

    Raises:
        DigestMismatch: It has another one.
        Malformed: As in `views` and parse_header.
    """
    data = where.read_bytes()
    if digest is not None and digest_of(data) != digest:
        raise DigestMismatch(f"{where} is damaged: its bytes are not those that were written")
    return views(np.frombuffer(data, dtype=np.uint8), layout_in(memoryview(data), Limits(), str(where)), str(where))


def write_tensors(where: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> Blob:
    """Write arrays of float64 as one blob, which appears under its name whole or not at all.

    Raises:
        DiskFull: The disk has no room.
    """
    layout = layout_of({name: TensorSpec("F64", np.shape(tensor)) for name, tensor in tensors.items()})
    data = b"".join([layout.header, *[np.asarray(tensors[name], dtype="<f8").tobytes() for name in layout.manifest]])
    write_file(where, data, PUBLIC, durable=False)
    return Blob(where.name, digest_of(data), len(data))
