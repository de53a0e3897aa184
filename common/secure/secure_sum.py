"""Secure aggregation as a transform: an update becomes whole numbers on the device, and a cohort one sum on the server.

Masks are not added in `on_device`: the device commits the numbers with its order, and masks them when its cohort has agreed on
keys (attune.fedclient.secure_member).

For a clipping bound c and a weight w of at most 1, a number x becomes x * w * 2^20 / c, rounded at random to one of its
neighbours with the right mean (to 2^-16 of their distance). The sum of up to 2^10 devices fits into 31 bits and a sign. Sums
over samples become whole numbers of EXACT_BYTES, in units of 2^-80, cut off towards 0. Sums of up to 2^8 fit into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from attune.common.errors import UpdateRefused
from attune.common.exchange.registry import SecureSumSettings
from attune.common.exchange.transform import (
    REACHES,
    SUMMED,
    ArrivalContext,
    Cohort,
    DeviceContext,
    MaskRemover,
    NotASum,
    PartUpdate,
    RoundContext,
    SealedTensors,
    Unchanged,
    above,
)
from attune.common.secure.masked_sums import added, plus_masks
from attune.common.secure.masks import add_masks, mask_ciphers
from attune.common.wire.blobs import LocalFile, Readable
from attune.common.wire.header import Limits, Manifest, TensorSpec, check_manifest, layout_in
from attune.common.wire.tensors import DTYPES, TensorSource, empty

ONE = 1 << 20  # stands for the clipping bound, and for the weight 1
_PIECE = 1 << 15  # numbers that stay in the cache
EXACT_BYTES = 16
_UNITS = [2.0 ** (32 * place - 80) for place in range(4)]  # of the digits of 32 bits, from the lowest
_OFFSET = 1 << 22  # makes the highest digit positive


def weight_units(samples: float, most_samples: int) -> int:
    """Return the weight m_i / m_max in units of 1 / ONE, from 1 to ONE."""
    return max(1, min(ONE, round(ONE * samples / most_samples)))


def encode(change: torch.Tensor, weight: int, clip: float, draws: np.random.PCG64) -> torch.Tensor:
    """Return a change as int32 numbers of the same shape, each at most ONE.

    Args:
        change: Finite numbers.
        weight: Weight in units of 1 / ONE.
        clip: Largest absolute value that counts.
        draws: What the rounding is drawn from.
    """
    change_N = change.reshape(-1)
    numbers_N = torch.empty(change_N.shape, dtype=torch.int32)
    for start in range(0, len(change_N), _PIECE):
        scaled_P = change_N[start : start + _PIECE].to(torch.float64, copy=True).mul_(weight / clip)
        scaled_P.add_(_draws(len(scaled_P), draws), alpha=2.0**-16)
        numbers_N[start : start + _PIECE] = scaled_P.round_().clamp_(-weight, weight)
    return numbers_N.view(change.shape)


def _draws(count: int, draws: np.random.PCG64) -> torch.Tensor:
    """Return random odd numbers between -2^15 and 2^15, (count,) int16.

    Their mean is 0. A whole number plus 2^-16 times one of them rounds to itself.
    """
    four_at_once = draws.random_raw(-(-count // 4))  # uint64
    return torch.from_numpy(four_at_once.view(np.int16)[:count] | 1)


def decode(total: torch.Tensor, weight: int, clip: float) -> torch.Tensor:
    """Return the weighted mean, float64, of which `total` is the sum.

    Args:
        total: Sum of encoded changes, int32.
        weight: Sum of their weights.
        clip: Same as in `encode`.
    """
    return total.double() * (clip / weight)


def encode_exactly(numbers_N: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers as whole numbers of four digits, the lowest first, (4 N,) int32.

    Raises:
        UpdateRefused: One of them is not finite, or 2^38 or more.
    """
    rest_N = numbers_N.numpy()
    if not (np.abs(rest_N) < _OFFSET * _UNITS[-1]).all():
        raise UpdateRefused("its sums over samples have numbers that are not finite or too large: scale its data")
    digits_N4 = np.empty((len(rest_N), 4), dtype=np.int64)
    for place in (3, 2, 1, 0):  # each step is exact: a digit is a piece of the mantissa
        digits_N4[:, place] = np.trunc(rest_N / _UNITS[place])
        rest_N = rest_N - digits_N4[:, place] * _UNITS[place]
    digits_N4[:, 3] += _OFFSET
    for place in range(3):
        digits_N4[:, place + 1] += digits_N4[:, place] >> 32
    return torch.from_numpy(digits_N4.reshape(-1).astype(np.uint32).view(np.int32))


def decode_exactly(total: bytes, devices: int) -> torch.Tensor:
    """Return the sum of so many devices' numbers, (N,) float64, rounded to the nearest or the next number."""
    digits_N4 = np.frombuffer(total, "<u4").reshape(-1, 4).astype(np.int64)
    digits_N4[:, 3] -= devices * _OFFSET
    sums_N = np.zeros(len(digits_N4))
    for place in (3, 2, 1, 0):
        sums_N += digits_N4[:, place] * _UNITS[place]
    return torch.from_numpy(sums_N)


# Among the tensors of a part: the device's weight in units of 1 / ONE; then for each metric the weight, if the device has
# measured it, and the weight times the metric over its bound; then 1 for each of REACHES below its largest change, else 0.
REPORT = "+report"
BOUNDS = dict.fromkeys(SUMMED, 1.0) | {"loss": 64.0}  # a larger value counts as the bound
REPORTED = (
    "weight",
    *(field for name in BOUNDS for field in (f"weight of {name}", name)),
    *(f"above {reach:g}" for reach in REACHES),
)
NUMBERS = "I32"
EXACT = "+sums"  # sums over samples, in the order of their names: one whole number (attune.common.secure.masked_sums)
EXACT_MASKS = "sums over samples"


def sealed_manifest(manifest: Mapping[str, TensorSpec], exact: bool = False) -> Manifest:
    """Return the manifest of a masked part. Whole-number tensors, such as counters of batches, are not handed in."""
    if exact:
        digits = sum(math.prod(spec.shape) for spec in manifest.values()) * EXACT_BYTES // 4
        return {EXACT: TensorSpec(NUMBERS, (digits,)), REPORT: TensorSpec(NUMBERS, (len(REPORTED),))}
    floating = {name: spec for name, spec in manifest.items() if DTYPES[spec.dtype].is_floating_point}
    report = TensorSpec(NUMBERS, (len(REPORTED),))
    return {name: TensorSpec(NUMBERS, spec.shape) for name, spec in floating.items()} | {REPORT: report}


def masked(part: str, where: Path | Readable, seeds: Sequence[tuple[bytes, bool]]) -> bytearray:
    """Return the blob of a device's numbers behind its masks.

    Args:
        part: The part.
        where: The blob of the encoded tensors from `on_device`, int32.
        seeds: Seed of each mask, and whether the mask is subtracted.
    """
    source = LocalFile(where) if isinstance(where, Path) else where
    try:
        blob_B = bytearray(source.size)
        source.read_into(memoryview(blob_B), 0)
    finally:
        source.close()
    spans, ciphers = layout_in(memoryview(blob_B), Limits(), source.name).spans, mask_ciphers(seeds, part)
    for number, name in enumerate(sorted(spans)):
        start, end = spans[name]
        if name == EXACT:
            blob_B[start:end] = plus_masks(bytes(blob_B[start:end]), seeds, EXACT_MASKS)
            continue
        add_masks(np.frombuffer(blob_B, np.uint8)[start:end].view("<u4"), ciphers, number)
    return blob_B


class SecureSum(Unchanged):
    """Sum of a cohort's changes, of which the server reads nothing else."""

    seals = True

    def __init__(self, name: str, settings: SecureSumSettings) -> None:
        self.name, self._settings = name, settings

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        """Return the change from what was served, as whole numbers, with the weight; or sums over samples as they are.

        Raises:
            UpdateRefused: The device has fewer samples than the plan demands, was served nothing, or its change is not finite.
        """
        settings = self._settings
        if update.weight < settings.samples:
            raise UpdateRefused(
                f"{update.client} has {update.weight:.0f} training samples; secure aggregation here takes devices with at "
                f"least {settings.samples} (privacy.secure_samples)"
            )
        weight, draws = weight_of(settings, update.weight), np.random.PCG64(context.seed("secure rounding"))
        if settings.exact:
            sums_N = torch.cat([update.tensors[name].reshape(-1) for name in sorted(update.tensors)])
            return replace(update, tensors={EXACT: encode_exactly(sums_N), REPORT: _report(weight, context.measured, 0.0)})
        change = {name: tensor for name, tensor in update.tensors.items() if tensor.is_floating_point()}
        if not context.change:
            if context.before is None:
                raise UpdateRefused(f"secure aggregation sums changes, and the order serves no {context.part} values")
            change = {name: tensor - context.before[name] for name, tensor in change.items()}
        largest = [float(max(map(abs, tensor.aminmax()))) for tensor in change.values() if tensor.numel()]
        if not all(map(math.isfinite, largest)):
            raise UpdateRefused(f"{update.client}'s update has numbers that are not finite: a smaller train.lr may help")
        # A change that is reduced to the norm counts up to a larger bound, of which the same share is left.
        clip = settings.clip / (_bounded(change, settings.norm) if settings.norm else 1.0)
        numbers = {name: encode(change[name], weight, clip, draws) for name in sorted(change)}
        reached = max(largest, default=0.0) / clip
        return replace(update, tensors=numbers | {REPORT: _report(weight, context.measured, reached)})

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Check the form. Values behind masks can be any numbers."""
        check_manifest(update.source.manifest, sealed_manifest(context.manifest, self._settings.exact), context.who)
        return update

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        """Return one update that stands for the cohort.

        Raises:
            UpdateRefused: There is nothing that takes the masks off.
            NotASum: The numbers are no sum.
        """
        if not cohort.updates:
            return cohort
        if context.unmasking is None:
            raise UpdateRefused(f"nothing can unmask the {cohort.part} updates of this cohort")
        exact = self._settings.exact
        before = None if exact else context.before(cohort.updates[0].client)
        total = (UnmaskedSums if exact else Unmasked)(
            cohort, self.name, context.manifest, before, context.unmasking, self._settings.clip
        )
        reached = () if exact else zip(REACHES, total.above, strict=True)  # sums are not clipped
        facts = total.means | {above(cohort.part, reach): count for reach, count in reached}
        members = tuple(update.client for update in cohort.updates) if exact else ()
        one = PartUpdate("the sum of the cohort", total.weight / ONE, total, facts=facts, members=members)
        return Cohort(cohort.part, (one,))


def weight_of(settings: SecureSumSettings, samples: float) -> int:
    """Return the weight of a device with so many training samples, in units of 1 / ONE."""
    return ONE if settings.uniform else weight_units(samples, max(1, settings.most_samples))


def _report(weight: int, measured: Mapping[str, float], reached: float) -> torch.Tensor:
    numbers = [weight]
    for name, bound in BOUNDS.items():
        share = max(-1.0, min(1.0, measured[name] / bound)) if name in measured else 0.0
        numbers += [weight if name in measured else 0, round(weight * share)]
    numbers += [int(reached > reach) for reach in REACHES]
    return torch.tensor(numbers, dtype=torch.int32)


def _bounded(change: Mapping[str, torch.Tensor], most: float) -> float:
    """Return the factor that brings the L2 norm of a change down to `most`, if it is larger."""
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in change.values()))
    return min(1.0, most / norm) if norm else 1.0


class Unmasked(TensorSource):
    """The weighted mean of a cohort's values, unmasked tensor by tensor.

    Args:
        cohort: Its updates, sealed.
        by: The transform that sealed them.
        manifest: Dtype and shape of each tensor.
        before: The value from which all devices' changes are; None if the mean change itself is wanted.
        unmasking: Seeds that take the masks off.
        clip: The bound of one change.

    Attributes:
        weight: Weight of all updates together, in units of 1 / ONE.
        means: Weighted means of the metrics that the devices have measured.
        above: How many devices have a change above each of REACHES times the bound.
    """

    def __init__(
        self,
        cohort: Cohort,
        by: str,
        manifest: Manifest,
        before: TensorSource | None,
        unmasking: MaskRemover,
        clip: float,
    ) -> None:
        sealed = [update.tensors for update in cohort.updates]
        self._sources = [tensors.opened(by) for tensors in sealed if isinstance(tensors, SealedTensors)]
        self._part, self._before, self._unmasking, self._clip = cohort.part, before, unmasking, clip
        self._manifest = manifest
        self._numbers = {name: number for number, name in enumerate(sorted(self._sources[0].manifest))}
        self.weight, *sums = self._sum(REPORT).tolist()
        sums, self.above = sums[: 2 * len(BOUNDS)], sums[2 * len(BOUNDS) :]
        counts = dict(zip(BOUNDS, zip(sums[::2], sums[1::2], strict=True), strict=True))
        fits = all(0 <= count <= self.weight and abs(value) <= count for count, value in counts.values())
        fits = fits and [len(self._sources), *self.above, 0] == sorted([len(self._sources), *self.above, 0], reverse=True)
        if not fits or not 0 < self.weight <= ONE * len(self._sources):
            raise NotASum(f"the reports of the {cohort.part} updates are no sum of {len(self._sources)} devices")
        self.means = {name: BOUNDS[name] * value / count for name, (count, value) in counts.items() if count}

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        before = self._before[name] if self._before is not None else empty(self._manifest[name]).zero_()
        if name not in self._numbers:
            return before
        total = self._sum(name)
        if total.numel() and int(total.abs().max()) > self.weight:
            raise NotASum(f"{name} of the {self._part} updates is no sum of clipped changes")
        change = decode(total, self.weight, self._clip).view(before.shape)
        return (before.double() + change).to(before.dtype)

    def _sum(self, name: str) -> torch.Tensor:
        """Return the sum of a tensor's numbers, (N,) int64."""
        number = self._numbers[name]
        total_N = self._unmasking.mask(self._part, number, self._sources[0][name].numel())
        for source in self._sources:
            total_N += source[name].reshape(-1).numpy().view(np.uint32)
        return torch.from_numpy(total_N.view(np.int32)).long()


class UnmaskedSums(Unmasked):
    """Sums over the samples of a whole cohort, float64. The arguments are those of Unmasked."""

    @cached_property
    def _total(self) -> dict[str, torch.Tensor]:
        number = bytes(4 * self._sources[0].manifest[EXACT].shape[0])
        for source in self._sources:
            number = added(number, source[EXACT].numpy().tobytes())
        sums_N = decode_exactly(plus_masks(number, self._unmasking.seeds, EXACT_MASKS), len(self._sources))
        names, shapes = sorted(self._manifest), {name: spec.shape for name, spec in self._manifest.items()}
        pieces = sums_N.split([math.prod(shapes[name]) for name in names])
        return {name: piece.view(shapes[name]) for name, piece in zip(names, pieces, strict=True)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._total[name]
