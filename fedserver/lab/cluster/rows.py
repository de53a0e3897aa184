"""Tensors as rows of bytes that travel to a worker and back: one row has the tensors of one client, or of one vault key."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import DTYPES, Tensors, manifest_of, views
from attune.fedserver.lab.aggregators.base import read_into

Row = np.ndarray[Any, np.dtype[np.uint8]]
Sent = tuple[Manifest, Row]  # tensors of which nobody but their sender knows the manifest


def row_of(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> Row:
    """The tensors that the manifest names, in the layout of a safetensors file; the header's place is empty."""
    layout = layout_of(manifest)
    row_B = torch.empty(layout.size, dtype=torch.uint8)
    for name, (start, end) in layout.spans.items():
        if start < end:
            read_into(tensors, name, row_B[start:end].view(DTYPES[manifest[name].dtype]))
    return row_B.numpy()


def tensors_in(row: Row, manifest: Manifest) -> Tensors:
    """The tensors of a row, as views that must not be written to: it may lie in memory that others read too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        row_B = torch.from_numpy(row)
    return views(row_B, layout_of(manifest), "a row of a worker")


def sent(tensors: Mapping[str, torch.Tensor]) -> Sent:
    manifest = manifest_of(tensors)
    return manifest, row_of(tensors, manifest)


def received(message: Sent) -> Tensors:
    manifest, row = message
    return tensors_in(row, manifest)


def size_bytes(rows: Iterable[Row]) -> int:
    return sum(row.nbytes for row in rows)
