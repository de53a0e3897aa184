"""An update as its aggregator wants it: in the dtypes of the part, whatever it was written in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attune.common.wire.blobs import Readable
from attune.common.wire.files import TensorFile
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import DTYPES


class Decoded(TensorFile):
    """A TensorFile of tensors with `manifest`; what is in its dtype already is not copied. The lab has checked the rest."""

    def __init__(self, source: Readable, manifest: Manifest) -> None:
        super().__init__(source)
        self._wanted = manifest

    @property
    def manifest(self) -> Manifest:
        return {name: self._wanted[name] for name in super().manifest}

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).to(DTYPES[self._wanted[name].dtype])

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        return super().span(name, start, end).to(DTYPES[self._wanted[name].dtype])

    def blocks(self, name: str, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        for start, block_N in super().blocks(name, count):
            yield start, block_N.to(DTYPES[self._wanted[name].dtype])

    def read_into(self, name: str, out_N: torch.Tensor) -> None:
        if super().manifest[name].dtype == self._wanted[name].dtype:
            super().read_into(name, out_N)
        else:
            out_N.copy_(self[name].view(-1))
