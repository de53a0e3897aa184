"""Encodings of parts with loss: what a tensor is on its way, and how far what is read may be from what was written.

`bf16`: float32 values as bfloat16, rounded to the nearest (ties to even), everything else as it is. A value x arrives within
2^-8 |x|, or within 2^-134 where |x| < 2^-126; what rounds beyond the largest bfloat16 arrives as infinite, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import Tensors

_NARROW = {"bf16": ("F32", "BF16", torch.bfloat16)}


def encoded_manifest(manifest: Mapping[str, TensorSpec], encoding: str) -> Manifest:
    """What tensors of this manifest are on their way. Errors: KeyError for an encoding that is none; "" is no encoding."""
    if not encoding:
        return dict(manifest)
    wide, narrow, _ = _NARROW[encoding]
    return {name: TensorSpec(narrow, spec.shape) if spec.dtype == wide else spec for name, spec in manifest.items()}


def encode(tensors: Mapping[str, torch.Tensor], encoding: str) -> Tensors:
    """As they are written. Errors: as `encoded_manifest`."""
    if not encoding:
        return dict(tensors)
    dtype = _NARROW[encoding][2]
    return {name: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor for name, tensor in tensors.items()}
