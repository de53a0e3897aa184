"""Tensors that are read or computed at each access, so that nothing but the piece at hand is in memory; and views of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch

from attune.common.wire.header import Manifest
from attune.common.wire.tensors import DTYPES

BLOCK = 1 << 18  # numbers at a time, which stay in the cache


class TensorSource(Mapping[str, torch.Tensor]):
    """Named tensors on the CPU. Each access gives a new tensor."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Dtype and shape of each tensor."""

    @property
    def stored(self) -> bool:
        """Whether the values are those of a blob, in the dtypes in which they lie there."""
        return False

    def __contains__(self, name: object) -> bool:
        return name in self.manifest  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest)

    def __len__(self) -> int:
        return len(self.manifest)

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

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

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        return piece_N.to(DTYPES[self._wanted[name].dtype])

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        if self.source.manifest[name].dtype == self._wanted[name].dtype:
            self.source.read_into(name, out_N)
        else:
            super().read_into(name, out_N)


class WatchedTensors(TensorView):
    """A source whose values are looked at as they are read, in blocks of BLOCK numbers at most, and stay as they are."""

    @property
    def stored(self) -> bool:
        return self.source.stored

    @abstractmethod
    def look(self, name: str, block_N: torch.Tensor, start: int) -> None:
        """Look at the elements of a tensor from `start` on. An error ends the reading."""

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        for offset in range(0, len(piece_N), BLOCK):
            self.look(name, piece_N[offset : offset + BLOCK], start + offset)
        return piece_N
