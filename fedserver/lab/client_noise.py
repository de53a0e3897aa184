"""Noise on the sum of a cohort's clipped changes: client-level differential privacy.

McMahan, Ramage, Talwar, Zhang, 'Learning Differentially Private Recurrent Language Models', ICLR 2018, Algorithm 1, with a
fixed denominator; the normals are those of Holohan and Braghin, 'Secure Random Sampling in Differential Privacy', ESORICS 2021.

The noise is a function of a secret in the home and of everything that the released value follows from. So a restart repeats the
bits, and a round that is closed with other updates gets other noise: otherwise the difference of the two values would be the
updates by which they differ.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from attune.common.exchange.transform import Cohort, PartUpdate, RoundContext, Unchanged
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import TensorSource
from attune.fedserver.lab.checks import change_norm
from attune.fedserver.ports.blobs import NOISE_SECRET, Blobs, Damaged

SECRET_BYTES = 32
PIECE = 1 << 16  # normals that are drawn at a time
DRAWS = 4  # Box-Muller normals in each normal
TWO_POW_53 = float(1 << 53)


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


def noise_key(secret: bytes, run: str, part: str) -> bytes:
    """Return the key of a part's noise in a run, (32,) bytes."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=_joined("attune client noise", run, part)).derive(secret)


def nonce_of(round_number: int, attempt: int, inputs: Iterable[str]) -> bytes:
    """Return the nonce of one release, (16,) bytes: a block counter at 0, and 96 bits of SHA-256 of what is released.

    Args:
        round_number: The round.
        attempt: Its attempt.
        inputs: Digests of the updates that count, and of what else the value follows from.
    """
    text = _joined(str(round_number), str(attempt), *sorted(inputs))
    return bytes(4) + hashlib.sha256(text).digest()[:12]


def home_key(blobs: Blobs, insecure_seed: int | None, run: str, part: str) -> bytes:
    """Return `noise_key` by the secret of this home."""
    return noise_key(secret_of(blobs, insecure_seed), run, part)


def _joined(*what: str) -> bytes:
    """Return texts as bytes from which each of them can be told: with their lengths."""
    return b"".join(len(text.encode()).to_bytes(4, "big") + text.encode() for text in what)


class NormalStream:
    """Stream of standard normals, from a key and a nonce that belongs to one release."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

    def draw(self, count: int) -> np.ndarray:
        """Return the next `count` normals, (N,) float64: each the sum of four Box-Muller normals, divided by 2."""
        pieces = [self._piece(min(PIECE, count - start)) for start in range(0, count, PIECE)]
        return np.concatenate(pieces) if pieces else np.empty(0)

    def _piece(self, count: int) -> np.ndarray:
        bits = np.frombuffer(self._stream.update(bytes(8 * DRAWS * count)), dtype="<u8").reshape(DRAWS, count) >> 11
        radius, angle = np.sqrt(-2 * np.log((bits[:2] + 1) / TWO_POW_53)), 2 * math.pi * (bits[2:] / TWO_POW_53)
        normals: np.ndarray = (radius * (np.cos(angle) + np.sin(angle))).sum(axis=0) / 2
        return normals


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
        stream = NormalStream(self._key(cohort.part), nonce)
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
        stream: NormalStream,
    ) -> torch.Tensor:
        value = before[name]
        wide = value.double()
        total = torch.zeros_like(wide)
        for update in updates:
            total.add_(update.tensors[name].double() - wide, alpha=factors[update.client])
        total.add_(torch.from_numpy(stream.draw(wide.numel())).view(wide.shape), alpha=self._deviation)
        return (wide + total / self._denominator).to(value.dtype)


class _Values(TensorSource):
    def __init__(self, values: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
        self._values, self._manifest = values, manifest

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]
