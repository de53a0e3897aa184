"""Noise on the sum of a cohort's clipped changes: client-level differential privacy.

McMahan, Ramage, Talwar, Zhang, 'Learning Differentially Private Recurrent Language Models', ICLR 2018, Algorithm 1, with a
fixed denominator; the normals are those of `common.privacy.noise`. Adaptive clipping: Andrew, Thakkar, McMahan, Ramaswamy,
'Differentially Private Learning with Adaptive Clipping', NeurIPS 2021, Algorithm 1.

The noise is a function of a secret in the home and of everything that the released value follows from. So a restart repeats the
bits, and a round that is closed with other updates gets other noise: otherwise the difference of the two values would be the
updates by which they differ.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch

from attune.common.exchange.transform import Cohort, PartUpdate, RoundContext, Unchanged
from attune.common.privacy.noise import SECRET_BYTES, NoiseStream, joined, key_of
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import TensorSource
from attune.fedserver.lab.checks import change_norm
from attune.fedserver.ports.blobs import NOISE_SECRET, Blobs, Damaged

CLIP_RATE = 0.2  # of the clipping norm's steps, as in the paper
CLIP = ""  # name of the clipping norm among the norms of devices, which have longer names


class Noises(msgspec.Struct, frozen=True):
    """Deviations of the noise of one part.

    Attributes:
        sum: Of the sum of changes, in clipping norms.
        count: Of the count of changes within the clipping norm.
    """

    sum: float
    count: float = 0.0


def noises_of(noise: float, blocks: int, denominator: int, counts: bool) -> Noises:
    """Return how the noise is divided between the sum of changes and the count of those within the clipping norm.

    A count of values -1/2 and 1/2 with the deviation s costs what a sum with the multiplier 2 s does. Theorem 1: the two cost
    as much as a sum alone with the multiplier z if z_sum = (z^-2 - (2 s)^-2)^(-1/2).

    Args:
        noise: sigma, the noise multiplier that is accounted for.
        blocks: B, the number of parts: each has the multiplier z = sigma sqrt(B).
        denominator: q n.
        counts: A count is released.
    """
    multiplier = noise * math.sqrt(blocks)
    if not counts or not noise:
        return Noises(multiplier)
    count = max(denominator / 20, multiplier)  # q n / 20 as in the paper, and no less than leaves noise for the sum
    return Noises((multiplier**-2 - (2 * count) ** -2) ** -0.5, count)


def secret_of(blobs: Blobs, insecure_seed: int | None = None) -> bytes:
    """Return the secret of this home, made at the first call; for a simulation with a seed one that follows from it.

    Raises:
        Damaged: It has another length than was written.
    """
    if insecure_seed is not None:
        return hashlib.sha256(f"attune insecure seed {insecure_seed}".encode()).digest()
    try:
        secret = blobs.get(NOISE_SECRET)
    except KeyError:
        secret = os.urandom(SECRET_BYTES)
        blobs.put(NOISE_SECRET, secret)
    if len(secret) != SECRET_BYTES:
        raise Damaged(
            f"{NOISE_SECRET} has {len(secret)} bytes instead of {SECRET_BYTES}: restore it from a backup", NOISE_SECRET
        )
    return secret


def nonce_of(round_number: int, attempt: int, inputs: Iterable[str]) -> bytes:
    """Return the nonce of one release, (16,) bytes: a block counter at 0, and 96 bits of SHA-256 of what is released.

    Args:
        round_number: The round.
        attempt: Its attempt.
        inputs: Digests of the updates that count, and of what else the value follows from.
    """
    return bytes(4) + hashlib.sha256(joined(round_number, attempt, *sorted(inputs))).digest()[:12]


def noise_key(secret: bytes, run: str, part: str) -> bytes:
    """Return the key of a part's noise in a run, (32,) bytes."""
    return key_of(secret, "client level", run, part)


def home_key(blobs: Blobs, insecure_seed: int | None, run: str, part: str) -> bytes:
    """Return `noise_key` by the secret of this home."""
    return noise_key(secret_of(blobs, insecure_seed), run, part)


class ClientNoise(Unchanged):
    """Transform that replaces a cohort by one update: the present value, plus the noisy sum of clipped changes over q n.

    Args:
        clip: C, the largest L2 norm of a device's change of this part.
        noise: sigma, the noise multiplier.
        denominator: q n, by which sums are divided, however many devices answered.
        blocks: B, the number of parts. Each is clipped by itself, so the deviation of the sum's noise is sigma sqrt(B) C.
        key: Returns the key of a part's noise.
        quantile: Share of changes that the clipping norm shall hold; None: it stays at `clip`.
    """

    name = "client-noise"

    def __init__(
        self,
        clip: float,
        noise: float,
        denominator: int,
        blocks: int,
        key: Callable[[str], bytes],
        quantile: float | None = None,
    ) -> None:
        self._clip, self._denominator, self._quantile = clip, denominator, quantile
        self._noises = noises_of(noise, blocks, denominator, counts=quantile is not None)
        self._settings = f"{noise!r} {denominator} {blocks} {quantile!r}"
        self._key = key

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        """Return the one update. Without any device it is the present value with noise alone."""
        before = context.before("")
        assert before is not None  # noqa: S101 - core.client_privacy refuses parts of which changes are handed in
        clip = self._clip if self._quantile is None else context.norms.get(CLIP, self._clip)
        norms = {update.client: change_norm(update.source, before) for update in cohort.updates}
        factors = {name: min(1.0, clip / norm) if norm else 1.0 for name, norm in norms.items()}
        nonce = nonce_of(context.round, context.attempt, [*context.inputs, f"{clip!r} {self._settings}"])
        stream = NoiseStream(self._key(cohort.part), nonce)
        # Drawn at once and in a fixed order, so that each number has its noise however often and in which order it is read.
        values = {
            name: self._released(name, before, cohort.updates, factors, stream, self._noises.sum * clip)
            for name in sorted(before.manifest)
        }
        if self._quantile is not None:
            within = sum(0.5 if norm <= clip else -0.5 for norm in norms.values()) + self._noises.count * float(
                stream.normal(1)
            )
            share = within / self._denominator + 0.5
            context.norms[CLIP] = clip * math.exp(-CLIP_RATE * (share - self._quantile))  # durable with the value
        return Cohort(cohort.part, (PartUpdate("the noisy sum of the cohort", 1.0, _Values(values, before.manifest)),))

    def _released(
        self,
        name: str,
        before: TensorSource,
        updates: Sequence[PartUpdate],
        factors: Mapping[str, float],
        stream: NoiseStream,
        deviation: float,
    ) -> torch.Tensor:
        value = before[name]
        wide = value.double()
        total = torch.zeros_like(wide)
        for update in updates:
            total.add_(update.tensors[name].double() - wide, alpha=factors[update.client])
        total.add_(stream.normal(wide.numel()).view(wide.shape), alpha=deviation)
        return (wide + total / self._denominator).to(value.dtype)


class _Values(TensorSource):
    def __init__(self, values: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
        self._values, self._manifest = values, manifest

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]
