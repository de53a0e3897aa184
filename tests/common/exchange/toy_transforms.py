"""Two transforms of another package: one that devices apply and the server takes back, and one that masks what is handed in.

The masks are no secret: they follow from the devices' names, so that a test can take their sum off as a server with shared keys
would.
"""

import zlib
from typing import ClassVar

import torch
from msgspec.structs import replace

from attune.common.config import Positive
from attune.common.exchange.transform import (
    ArrivalContext,
    Cohort,
    DeviceContext,
    PartUpdate,
    RoundContext,
    SealedTensors,
    TransformSettings,
    Unchanged,
)
from attune.common.wire.header import Manifest, check_manifest
from attune.common.wire.tensors import TensorSource, TensorView

CALLS: list[tuple[str, str]] = []  # (hook, part or device) in the order of the calls in this process


class ScaleSettings(TransformSettings, frozen=True, forbid_unknown_fields=True):
    """A power of two changes no bit of what arrives."""

    implementation: ClassVar[str] = "toy_transforms:Scale"
    factor: Positive = 4.0


class Scale(Unchanged):
    """Hand in values times a factor."""

    def __init__(self, name: str, settings: ScaleSettings) -> None:
        self.name, self._factor = name, settings.factor

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        CALLS.append(("device", context.client))
        scaled = {name: times(tensor, self._factor) for name, tensor in update.tensors.items()}
        return replace(update, tensors=scaled)

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        CALLS.append(("arrival", context.client))
        return replace(update, tensors=Scaled(update.source, 1 / self._factor))

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        CALLS.append(("cohort", ",".join(update.client for update in cohort.updates)))
        return cohort


class Scaled(TensorView):
    def __init__(self, source: TensorSource, factor: float) -> None:
        super().__init__(source)
        self._factor = factor

    def changed(self, name: str, piece_N: torch.Tensor, start: int) -> torch.Tensor:
        return times(piece_N, self._factor)


def times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


class MaskSettings(TransformSettings, frozen=True, forbid_unknown_fields=True):
    """Only a sum can be read, so nothing can be bounded against others, and rounding would spoil the masks."""

    implementation: ClassVar[str] = "toy_transforms:Mask"
    growth: ClassVar[float] = 2.0
    excludes: ClassVar[frozenset[str]] = frozenset({"change-bound", "votes", "norm-limit", "bf16", "int8", "zstd"})


class Mask(Unchanged):
    """Hand in float64 values behind a mask of the device; the server takes all masks off the weighted mean at once."""

    seals = True

    def __init__(self, name: str, settings: MaskSettings) -> None:
        self.name = name

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        masked = {name: tensor.double() + mask_of(context.client) for name, tensor in update.tensors.items()}
        return replace(update, tensors=masked)

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        wide = {name: replace(spec, dtype="F64") for name, spec in context.manifest.items()}
        check_manifest(update.source.manifest, wide, context.who)
        return update

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        total = sum(update.weight for update in cohort.updates)
        return Cohort(cohort.part, (PartUpdate("their sum", total, Unmasked(cohort.updates, self.name, total)),))


class Unmasked(TensorSource):
    """The weighted mean of sealed updates, tensor by tensor."""

    def __init__(self, updates: tuple[PartUpdate, ...], by: str, total: float) -> None:
        self._shares = [update.weight / total for update in updates]
        self._masks = [mask_of(update.client) for update in updates]
        self._sources = [update.tensors.opened(by) for update in updates if isinstance(update.tensors, SealedTensors)]

    @property
    def manifest(self) -> Manifest:
        return {name: replace(spec, dtype="F32") for name, spec in self._sources[0].manifest.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        sums = [share * source[name] for share, source in zip(self._shares, self._sources, strict=True)]
        mask = sum(share * mask for share, mask in zip(self._shares, self._masks, strict=True))
        return (torch.stack(sums).sum(dim=0) - mask).float()


def mask_of(client: str) -> float:
    return 100.0 + zlib.crc32(client.encode()) % 97
