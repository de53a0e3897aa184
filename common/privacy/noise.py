"""Random numbers from a secret: nobody who lacks it can compute them, and the same secret and context give the same numbers.

Devices draw the noise of their steps from it, and the server that of its sums.

Normals are safe against attacks by the gaps between floating-point numbers as Holohan, Braghin, 'Secure Random Sampling in
Differential Privacy', ESORICS 2021, propose: each is the sum of four independent ones, divided by two. Four normals at a time are
such sums of the same four, by an orthogonal matrix, which keeps them independent.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32
BLOCK = 1 << 15  # normals that are made at a time: they stay in the cache
MIXED = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2  # orthogonal
_MANTISSA = (1 << 53) - 1


def joined(*context: str | int) -> bytes:
    """Return texts as bytes from which each of them can be told: with their lengths."""
    return b"".join(len(text := str(part).encode()).to_bytes(4, "big") + text for part in context)


def key_of(secret: bytes, *context: str | int) -> bytes:
    """Return the key for one purpose; another secret or context gives a key that has nothing to do with it."""
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=b"attune noise" + joined(*context)).derive(secret)


class NoiseStream:
    """Independent random numbers, one after the other.

    Args:
        key: 32 bytes.
        nonce: 16 bytes, the first 4 of which are 0. No other stream has the same key and nonce.
    """

    def __init__(self, key: bytes, nonce: bytes = bytes(16)) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        self._normals, self._used = torch.empty(0, dtype=torch.float64), 0

    def __repr__(self) -> str:
        return "NoiseStream(...)"

    def uniform(self, count: int) -> torch.Tensor:
        """Return numbers above 0 and at most 1, (count,) float64, each a multiple of 2^-53."""
        bits = np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<i8") & _MANTISSA
        return torch.from_numpy(bits).double().add_(1).mul_(2.0**-53)

    def normal(self, count: int) -> torch.Tensor:
        """Return standard normal numbers, (count,) float64."""
        if self._used + count > len(self._normals):
            left = self._normals[self._used :]
            blocks = -(-(count - len(left)) // BLOCK)
            self._normals, self._used = torch.cat([left, *(self._block() for _ in range(blocks))]), 0
        self._used += count
        return self._normals[self._used - count : self._used]

    def _block(self) -> torch.Tensor:
        """Return BLOCK normals by the method of Box and Muller; each pair of uniforms gives two, which are mixed with others."""
        radius, angle = self.uniform(BLOCK).view(2, BLOCK // 2)
        np.log(radius.numpy(), out=radius.numpy())  # numpy's is twice as fast as torch's
        radius.mul_(-2).sqrt_()
        angle.mul_(2 * math.pi)
        normals = torch.stack([angle.cos(), angle.sin_()]).mul_(radius)
        return torch.matmul(MIXED, normals.view(2, len(MIXED), -1)).view(-1)
