"""Tensors as the bytes of a blob, without copies and without NumPy's dtypes (it has no bfloat16); lazy tensors; and checks.

A lazy source reads or computes a tensor at each access, so that only the piece at hand is in memory. Views change or watch
its values as they are read. Checks: expected names, dtypes and shapes, and finite values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, TypeGuard

import torch

from attune.common.wire.header import ByManifest, Layout, Manifest, TensorSpec
from attune.common.wire.malformed import Malformed

Tensors = dict[str, torch.Tensor]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return dtype and shape of a tensor.

    Raises:
        Malformed: unsupported-tensor, if it has no plain bytes, or a dtype that the format does not have.
    """
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        raise Malformed(
            "unsupported-tensor",
            f"{name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be written; "
            f"convert it to a dense tensor of one of {', '.join(DTYPES)}",
        )
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return dtype and shape of each tensor by name, in the order of `tensors`.

    Raises:
        Malformed: unsupported-tensor.
    """
    return {name: spec_of(name, tensor) for name, tensor in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in C order (on little-endian hosts), as a view that keeps it alive.

    A tensor that is contiguous and on the CPU is not copied.
    """
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    if flat.shape[0] < 2:  # a single number may have any stride, with which torch views no bytes
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def room(size: int) -> torch.Tensor:
    """Return a buffer of so many bytes, whose values are not set."""
    return torch.empty(size, dtype=torch.uint8)


def empty(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor on the CPU whose values are not set."""
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])


def check_boolean(name: str, spec: TensorSpec, raw_B: torch.Tensor, who: str) -> None:
    """Check that the bytes of a BOOL tensor (raw_B: B bytes, uint8) are all 0 or 1. Other dtypes pass.

    Raises:
        Malformed: not-boolean.
    """
    if spec.dtype == "BOOL" and raw_B.numel() and int(raw_B.max()) > 1:
        raise Malformed("not-boolean", f"{who}: {name!r} is BOOL and has bytes other than 0 and 1; send it again")


def views(buffer_B: torch.Tensor, layout: Layout, who: str) -> Tensors:
    """Return the tensors of a whole blob as views into it. The blob stays in memory as long as one of them.

    Args:
        buffer_B: The blob's B bytes, uint8.
        layout: The checked layout.
        who: The blob's name in errors.

    Raises:
        Malformed: not-boolean.
    """
    tensors: Tensors = {}
    for name, spec in layout.manifest.items():
        start, end = layout.spans[name]
        if start == end:
            tensors[name] = empty(spec)
            continue
        raw = buffer_B[start:end]
        check_boolean(name, spec, raw, who)
        tensors[name] = raw.view(DTYPES[spec.dtype]).view(spec.shape)
    return tensors


BLOCK = 1 << 18  # numbers at a time, which stay in the cache


class TensorSource(ByManifest[torch.Tensor]):
    """Named tensors on the CPU. Each access gives a new tensor. watches: whether this is WatchedTensors."""

    watches: ClassVar[bool] = False

    @property
    def stored(self) -> bool:
        """True if the values are those of a blob, in the dtypes in which they lie there."""
        return False

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end) of a tensor in C order, flat."""
        return self[name].reshape(-1)[start:end]

    def blocks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, elements) of a tensor, flat, `count` at a time; a block is gone when the next is asked for."""
        tensor_N = self[name].reshape(-1)
        for start in range(0, len(tensor_N), count):
            yield start, tensor_N[start : start + count]

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        """Read all elements of a tensor in C order into `out_N`, which is flat and of its dtype."""
        out_N.copy_(self[name].reshape(-1))


class TensorView(TensorSource):
    """A source whose values are changed, piece by piece, as they are read."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    @abstractmethod
    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        """Return the values for the elements of a tensor from `start` on, which lie in `piece_N`."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.source[name]
        return self.changed(name, tensor.reshape(-1), 0).view(tensor.shape)

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        return self.changed(name, self.source.span(name, start, end), start)

    def blocks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        for start, block_N in self.source.blocks(name, count):
            yield start, self.changed(name, block_N, start)


class Cast(TensorView):
    """The same values in the dtypes of `manifest`; a tensor that is of its dtype already is not copied."""

    def __init__(self, source: TensorSource, manifest: Manifest) -> None:
        super().__init__(source)
        self._wanted = manifest

    @property
    def manifest(self) -> Manifest:
        return {name: self._wanted[name] for name in self.source.manifest}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.changed(name, self.source[name], 0)

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        return piece_N.to(DTYPES[self._wanted[name].dtype])

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        if self.source.manifest[name].dtype == self._wanted[name].dtype:
            self.source.read_into(name, out_N)
        else:
            super().read_into(name, out_N)


class WatchedTensors(TensorView):
    """A source whose values are looked at as they are read, in blocks of BLOCK numbers at most, and stay as they are."""

    watches: ClassVar[bool] = True

    @property
    def stored(self) -> bool:
        return self.source.stored

    @abstractmethod
    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        """Look at the elements of a tensor from `start` on. An error ends the reading."""

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        if 0 < piece_N.shape[0] <= BLOCK:  # most tensors are small: a slice costs as much as the look
            self.look(name, piece_N, start)
            return piece_N
        for offset in range(0, piece_N.shape[0], BLOCK):
            self.look(name, piece_N[offset : offset + BLOCK], start + offset)
        return piece_N


def _watches(tensors: TensorSource) -> TypeGuard[WatchedTensors]:
    """Return whether values are looked at. isinstance would ask Mapping, which takes three calls."""
    return tensors.watches


def read_through(tensors: TensorSource) -> None:
    """Read each tensor once, block by block, so that each check that watches has seen all of it."""
    looks: list[Callable[[str, torch.Tensor, int], None]] = []
    while _watches(tensors):
        looks, tensors = [tensors.look, *looks], tensors.source
    for name in tensors:
        for start, block_N in tensors.blocks(name, BLOCK):
            for look in looks:
                look(name, block_N, start)


def check_finite(name: str, tensor: torch.Tensor, who: str) -> None:
    """Check that all values are finite. Integers and empty tensors pass.

    Raises:
        Malformed: not-finite, with the numbers of NaN and infinite values.
    """
    if is_finite(tensor):
        return
    nans = infinite = 0
    for block in _blocks(tensor):
        nans += int(block.isnan().sum())
        infinite += int(block.isinf().sum())
    raise Malformed(
        "not-finite",
        f"{who}: {name!r} has {nans} NaN and {infinite} infinite of {tensor.numel()} values; lower the learning rate or clip",
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a temporary tensor. Integers and empty tensors are finite."""
    if not tensor.dtype.is_floating_point or 0 in tensor.shape:
        return True
    low, high = torch.aminmax(tensor.detach())  # both are NaN if any value is
    return math.isfinite(low) and math.isfinite(high)


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat_N = tensor.detach().reshape(-1)
    return (flat_N,) if flat_N.shape[0] <= BLOCK else torch.split(flat_N, BLOCK)
