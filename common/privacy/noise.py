"""Random numbers from a secret: nobody who lacks it can compute them, and the same secret and context give the same numbers.

Devices draw the noise of their steps from it, and the server that of its sums.

Normals are safe against attacks by the gaps between floating-point numbers as Holohan, Braghin, 'Secure Random Sampling in
Differential Privacy', ESORICS 2021, propose: each is the sum of four independent ones, divided by two. Four at a time are such
sums of the same four, by an orthogonal matrix, which keeps them independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32
BLOCK = 1 << 15  # normals that are made at a time: they stay in the cache
MIXED = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2  # orthogonal
_ZEROS = bytes(1 << 16)
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
        stream_B = bytearray(8 * count)
        self.fill(stream_B)
        bits = np.frombuffer(stream_B, dtype="<i8")
        bits &= _MANTISSA
        numbers = bits.view(np.float64)  # in the same place, which stays in the cache
        np.multiply(bits, 2.0**-53, out=numbers)
        numbers += 2.0**-53
        return torch.from_numpy(numbers)

    def fill(self, stream_B: bytearray | memoryview) -> None:
        """Write random bytes."""
        zeros = memoryview(_ZEROS)
        for start in range(0, len(stream_B), len(zeros)):
            piece_B = memoryview(stream_B)[start : start + len(zeros)]
            self._cipher.update_into(zeros[: len(piece_B)], piece_B)

    def normal(self, count: int) -> torch.Tensor:
        """Return standard normal numbers, (count,) float64."""
        return torch.cat([torch.empty(0, dtype=torch.float64), *self.pieces(count)])

    def pieces(self, count: int) -> Iterator[torch.Tensor]:
        """Yield the same numbers piece by piece. A piece may be changed."""
        while count:
            if self._used == len(self._normals):
                self._normals, self._used = self._block(), 0
            piece = self._normals[self._used : self._used + count]
            self._used, count = self._used + len(piece), count - len(piece)
            yield piece

    def _block(self) -> torch.Tensor:
        """Return BLOCK normals by the method of Box and Muller; each pair of uniforms gives two, which are mixed with others.

        The angle's cosine and sine follow from the tangent of its half, which numpy computes several times as fast.
        """
        radius, tangent = self.uniform(BLOCK).view(2, BLOCK // 2).numpy()
        np.log(radius, out=radius)
        radius *= -2
        np.sqrt(radius, out=radius)
        tangent *= math.pi
        np.tan(tangent, out=tangent)
        scale = np.square(tangent)
        scale += 1
        np.divide(radius, scale, out=scale)
        scale *= 2
        normals = torch.empty(2, BLOCK // 2, dtype=torch.float64)
        np.subtract(scale, radius, out=normals[0].numpy())
        np.multiply(scale, tangent, out=normals[1].numpy())
        return torch.matmul(MIXED, normals.view(2, len(MIXED), -1)).view(-1)
