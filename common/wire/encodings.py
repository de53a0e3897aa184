"""Encodings of parts: what a tensor is on its way, and how far what is read may be from what was written.

`bf16`: float32 values as bfloat16, rounded to the nearest (ties to even), everything else as it is. A value x arrives within
2^-8 |x|, or within 2^-134 where |x| < 2^-126; what rounds beyond the largest bfloat16 arrives as infinite, and is refused.
`zstd`: without loss, the bytes of floating values by place, compressed (attune.common.wire.planes).
`int8`: of float32 values the change from what was served, in bytes (attune.common.wire.int8); everything else as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from attune.common.wire import int8, planes
from attune.common.wire.checks import check_manifest
from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import DTYPES, Tensors

_NARROW = {"bf16": ("F32", "BF16", torch.bfloat16)}
AS_THEY_LIE = ("", *_NARROW)  # what is read of a blob in these are the values themselves, in a dtype of theirs


@dataclass(frozen=True)
class Written:
    """Tensors as they are written; `errors`: of each value that lost something, what it lacks of what should arrive."""

    tensors: Tensors
    errors: Tensors = field(default_factory=dict)


def encoded_manifest(manifest: Mapping[str, TensorSpec], encoding: str) -> Manifest:
    """What tensors of this manifest are on their way; of `zstd` those that are not packed.

    Errors: KeyError for an encoding that is none; "" is no encoding.
    """
    if encoding in ("", "zstd"):
        return dict(manifest)
    if encoding == "int8":
        return int8.manifest_as_written(manifest)
    wide, narrow, _ = _NARROW[encoding]
    return {name: TensorSpec(narrow, spec.shape) if spec.dtype == wide else spec for name, spec in manifest.items()}


def encode(
    tensors: Mapping[str, torch.Tensor],
    encoding: str,
    base: Mapping[str, torch.Tensor] | None = None,
    owed: Mapping[str, torch.Tensor] | None = None,
) -> Written:
    """As they are written. Errors: as `encoded_manifest`.

    base: what the reader holds of these tensors; None if it holds nothing, or they are changes themselves. owed: the errors of
    the last update, by tensor, which are made up for with this one if the encoding has errors to keep.
    """
    if not encoding:
        return Written(dict(tensors))
    if encoding == "zstd":
        return Written({name: planes.packed(tensor, (base or {}).get(name)) for name, tensor in tensors.items()})
    if encoding == "int8":
        return _changes(tensors, base or {}, owed or {})
    dtype = _NARROW[encoding][2]
    return Written({name: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor for name, tensor in tensors.items()})


def decoded(
    written: Mapping[str, torch.Tensor],
    found: Manifest,
    encoding: str,
    manifest: Manifest,
    base: Mapping[str, torch.Tensor] | None,
    who: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `encode` was given, or stands for it, one tensor after the other, with the dtypes and shapes of `manifest`.

    written: as it came, with the manifest `found`; each tensor is read once. base: as there. Errors: Malformed, before the
    first tensor for what can be seen by then; KeyError as `encoded_manifest`.
    """
    expected, held = encoded_manifest(manifest, encoding), base or {}
    packed = {n for n, spec in found.items() if encoding == "zstd" and n in expected and planes.is_packed(spec, expected[n])}
    check_manifest(found, expected | {name: found[name] for name in packed}, who)
    if encoding == "int8":
        yield from _restored(written, manifest, held, who)
        return
    for name, spec in manifest.items():
        tensor = written[name]
        yield name, planes.unpacked(tensor, spec, held.get(name), who) if name in packed else tensor.to(DTYPES[spec.dtype])


def _changes(
    tensors: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], owed: Mapping[str, torch.Tensor]
) -> Written:
    written: Tensors = {}
    scales: list[torch.Tensor] = []
    errors: Tensors = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype is not torch.float32:
            written[name] = tensor
            continue
        change = tensor - base[name] if name in base else tensor
        change_N = (change + owed[name] if name in owed else change).reshape(-1)
        q_N, scale_K = int8.quantised(change_N)
        arrives = _on(base.get(name), int8.restored(q_N, scale_K).view(tensor.shape))
        lacks = tensor - arrives
        # An update that is not finite is refused; what it lacks must not spoil all that come after it.
        errors[name] = (lacks + owed[name] if name in owed else lacks).nan_to_num_(0.0, 0.0, 0.0)
        written[name] = q_N.view(tensor.shape)
        scales.append(scale_K)
    if scales:
        written[int8.SCALES] = torch.cat(scales)
    return Written(written, errors)


def _restored(
    file: Mapping[str, torch.Tensor], manifest: Manifest, base: Mapping[str, torch.Tensor], who: str
) -> Iterator[tuple[str, torch.Tensor]]:
    scale_K = file[int8.SCALES] if int8.SCALES in file else torch.empty(0)
    int8.check_scales(scale_K, who)
    start = 0
    for name, spec in sorted(manifest.items()):
        if spec.dtype != "F32":
            yield name, file[name]
            continue
        end = start + int8.blocks_of(spec)
        change = int8.restored(file[name].reshape(-1), scale_K[start:end]).view(spec.shape)
        yield name, _on(base.get(name), change)
        start = end


def _on(base: torch.Tensor | None, change: torch.Tensor) -> torch.Tensor:
    return change if base is None else base + change
