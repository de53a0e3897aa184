"""Encodings of parts: the form of a tensor on the wire, and how far the read value may be from the written one.

- `bf16`: float32 values as bfloat16, rounded to the nearest (ties to even); other dtypes are unchanged. A value x arrives
  within 2^-8 |x|, or within 2^-134 if |x| < 2^-126. Values above the largest bfloat16 arrive as infinite and are refused.
- `zstd`: lossless; the bytes of floating values by place, compressed (attune.common.wire.planes).
- `int8`: float32 values as deltas from the served value, in bytes (attune.common.wire.int8); other dtypes are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from attune.common.exchange.transform import ArrivalContext, DeviceContext, PartUpdate, Unchanged
from attune.common.wire import int8, planes
from attune.common.wire.header import Manifest, TensorSpec, check_manifest
from attune.common.wire.tensors import DTYPES, Tensors, TensorSource, spec_of

_NARROW = {"bf16": ("F32", "BF16", torch.bfloat16)}
AS_THEY_LIE = ("", *_NARROW)  # encodings whose tensors are the values themselves, perhaps in a narrower dtype


@dataclass(frozen=True)
class Written:
    """Encoded tensors. `errors` has for each lossy tensor the difference of the meant and the read value."""

    tensors: Tensors
    errors: Tensors = field(default_factory=dict)


def encoded_manifest(manifest: Mapping[str, TensorSpec], encoding: str) -> Manifest:
    """Return the manifest of the encoded tensors; for `zstd` that of tensors that are not packed.

    Raises:
        KeyError: There is no such encoding. "" means no encoding.
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
    """Encode tensors.

    Args:
        tensors: Values by name.
        encoding: Name of the encoding; "" returns the values.
        base: The values that the reader has; None if it has none, or if `tensors` are deltas.
        owed: The rounding errors of the last update by tensor, which a lossy encoding adds to this one.

    Raises:
        KeyError: There is no such encoding.
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
    sent: Manifest,
    encoding: str,
    manifest: Manifest,
    base: Mapping[str, torch.Tensor] | None,
    who: str,
) -> TensorSource:
    """Return what `encode` was given, or stands for it, with the dtypes and shapes of `manifest`, decoded at each access.

    Args:
        written: The tensors as they came.
        sent: Their manifest.
        encoding: Same as in `encode`.
        manifest: The manifest of the decoded values.
        base: Same as in `encode`.
        who: The tensors' origin, for errors.

    Raises:
        Malformed: The manifests do not fit, or (at an access) a tensor cannot be decoded.
        KeyError: As in `encoded_manifest`.
    """
    expected = encoded_manifest(manifest, encoding)
    packed = {n for n, spec in sent.items() if encoding == "zstd" and n in expected and planes.is_packed(spec, expected[n])}
    check_manifest(sent, expected | {name: sent[name] for name in packed}, who)
    return (_Restored if encoding == "int8" else _Unpacked)(written, manifest, base or {}, who)


class _Decoded(TensorSource):
    """Tensors that were written in an encoding, decoded at each access. Their manifest has been checked."""

    def __init__(
        self, written: Mapping[str, torch.Tensor], manifest: Manifest, base: Mapping[str, torch.Tensor], who: str
    ) -> None:
        self._written, self._manifest, self._base, self._who = written, manifest, base, who

    @property
    def manifest(self) -> Manifest:
        return self._manifest


class _Unpacked(_Decoded):
    """Tensors that are unpacked by zstd, or cast to their dtype if they are not packed."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, spec = self._written[name], self._manifest[name]
        if planes.is_packed(spec_of(name, tensor), spec):
            return planes.unpacked(tensor, spec, self._base.get(name), self._who)
        return tensor.to(DTYPES[spec.dtype])


class _Restored(_Decoded):
    """Values that are the base plus the change that int8 holds."""

    def __init__(
        self, written: Mapping[str, torch.Tensor], manifest: Manifest, base: Mapping[str, torch.Tensor], who: str
    ) -> None:
        super().__init__(written, manifest, base, who)
        self._scale_K = written[int8.SCALES] if int8.SCALES in written else torch.empty(0)
        int8.check_scales(self._scale_K, who)
        self._starts: dict[str, int] = {}
        start = 0
        for name, spec in sorted(manifest.items()):
            self._starts[name] = start
            start += int8.blocks_of(spec) if spec.dtype == "F32" else 0

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._manifest[name]
        if spec.dtype != "F32":
            return self._written[name]
        start = self._starts[name]
        scale_K = self._scale_K[start : start + int8.blocks_of(spec)]
        change = int8.restored(self._written[name].reshape(-1), scale_K).view(spec.shape)
        return _on(self._base.get(name), change)


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


def _on(base: torch.Tensor | None, change: torch.Tensor) -> torch.Tensor:
    return change if base is None else base + change


class PartEncoding(Unchanged):
    """Write a part as its order asks: bf16, int8 with error feedback, zstd (attune.common.exchange.encodings), or plain."""

    name = "encoding"

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        if not context.encoding:
            return update
        base = None if context.change else context.before
        written = encode(update.tensors, context.encoding, base, context.owed)
        context.errors |= written.errors
        return replace(update, tensors=written.tensors)

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Return the values. What is read as it lies in its blob stays: its dtypes are checked with its shapes."""
        if context.encoding in AS_THEY_LIE:
            return update
        written, base = update.source, context.before if context.served else None
        return replace(
            update, tensors=decoded(written, written.manifest, context.encoding, context.manifest, base, context.who)
        )
