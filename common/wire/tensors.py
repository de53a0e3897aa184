"""Conversion between tensors and the bytes of a blob, without copies and without NumPy's dtypes (it has no bfloat16)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.common.wire.header import (
    Layout,
    Limits,
    Manifest,
    TensorSpec,
    header_bytes,
    layout_of,
    parse_header,
)
from attune.common.wire.malformed import Malformed

__all__ = [
    "DTYPES",
    "Layout",
    "Limits",
    "Manifest",
    "TensorSpec",
    "Tensors",
    "bytes_of",
    "check_boolean",
    "empty",
    "header_bytes",
    "layout_of",
    "manifest_of",
    "parse_header",
    "spec_of",
    "views",
]

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
    return flat.view(torch.uint8).numpy().data


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
