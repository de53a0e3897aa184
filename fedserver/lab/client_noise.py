"""Noise on the sum of a cohort's clipped changes: client-level differential privacy.

McMahan, Ramage, Talwar, Zhang, 'Learning Differentially Private Recurrent Language Models', ICLR 2018, Algorithm 1, with a
fixed denominator; the normals are those of `common.privacy.noise`.

The noise is a function of a secret in the home and of everything that the released value follows from. So a restart repeats the
bits, and a round that is closed with other updates gets other noise: otherwise the difference of the two values would be the
updates by which they differ.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from attune.common.exchange.transform import Cohort, PartUpdate, RoundContext, Unchanged
from attune.common.privacy.noise import SECRET_BYTES, NoiseStream, joined, key_of
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import TensorSource
from attune.fedserver.lab.checks import change_norm
from attune.fedserver.ports.blobs import NOISE_SECRET, Blobs, Damaged


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
    """

    name = "client-noise"

    def __init__(self, clip: float, noise: float, denominator: int, blocks: int, key: Callable[[str], bytes]) -> None:
        self._clip, self._deviation, self._denominator = clip, noise * math.sqrt(blocks) * clip, denominator
        self._settings = f"{clip!r} {noise!r} {denominator} {blocks}"
        self._key = key

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        """Return the one update. Without any device it is the present value with noise alone."""
        before = context.before("")
        assert before is not None  # noqa: S101 - core.client_settings refuses parts of which changes are handed in
        factors = {update.client: self._factor(update, before) for update in cohort.updates}
        nonce = nonce_of(context.round, context.attempt, [*context.inputs, self._settings])
        stream = NoiseStream(self._key(cohort.part), nonce)
        # Drawn at once and in a fixed order, so that each number has its noise however often and in which order it is read.
        values = {name: self._released(name, before, cohort.updates, factors, stream) for name in sorted(before.manifest)}
        return Cohort(cohort.part, (PartUpdate("the noisy sum of the cohort", 1.0, _Values(values, before.manifest)),))

    def _factor(self, update: PartUpdate, before: TensorSource) -> float:
        norm = change_norm(update.source, before)
        return min(1.0, self._clip / norm) if norm else 1.0

    def _released(
        self,
        name: str,
        before: TensorSource,
        updates: Sequence[PartUpdate],
        factors: Mapping[str, float],
        stream: NoiseStream,
    ) -> torch.Tensor:
        value = before[name]
        wide = value.double()
        total = torch.zeros_like(wide)
        for update in updates:
            total.add_(update.tensors[name].double() - wide, alpha=factors[update.client])
        total.add_(stream.normal(wide.numel()).view(wide.shape), alpha=self._deviation)
        return (wide + total / self._denominator).to(value.dtype)


class _Values(TensorSource):
    def __init__(self, values: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
        self._values, self._manifest = values, manifest

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]
