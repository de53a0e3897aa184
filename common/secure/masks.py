"""Keys, shares and masks of one attempt. A device keeps one random root; all its keys, shares and masks follow from it.

X25519 (RFC 7748) agrees on secrets between two devices, HKDF-SHA256 (RFC 5869) derives keys from them, and AES-128 in counter
mode (NIST SP 800-38A) stretches a key to a mask: most processors have instructions for it, with which it takes less than half
the time of ChaCha20. Masks are 32-bit numbers, which are added modulo 2^32.

Secrets are shared over a prime field: any `threshold` shares give the secret, and fewer say nothing about it (Shamir, 'How to
Share a Secret', CACM 1979).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES128, AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from attune.common.errors import UpdateRefused

if TYPE_CHECKING:
    import numpy as np

KEY_BYTES = 32
_MASK_KEY_BYTES = 16
PRIME = 2**255 - 19
SECRET_BYTES = 31  # every number of so many bytes is in the field
SHARE_BYTES = 32
SEALED_BYTES = 2 * SHARE_BYTES + 16  # two shares and the tag
_COEFFICIENT_BYTES = 48  # 16 more than the prime has, so that the remainder is uniform
PIECE = 1 << 15  # numbers, so that a piece and a stream stay in the cache
_NO_NONCE = bytes(12)  # each key seals one message


def new_root() -> bytes:
    """Return fresh random bytes for an attempt of a device."""
    return secrets.token_bytes(KEY_BYTES)


def for_purpose(secret: bytes, purpose: bytes, length: int = KEY_BYTES) -> bytes:
    """Return a key for one purpose that follows from a secret."""
    return HKDF(SHA256(), length, salt=None, info=b"attune secure aggregation " + purpose).derive(secret)


def self_seed(root: bytes) -> bytes:
    """Return the seed of a device's self mask."""
    return for_purpose(root, b"self mask", SECRET_BYTES)


def pair_seed(root: bytes) -> bytes:
    """Return the seed of the private key with which a device agrees on masks; this seed is shared, not the key."""
    return for_purpose(root, b"pair masks", SECRET_BYTES)


def mask_key(seed: bytes) -> X25519PrivateKey:
    """Return the private key of a pair seed."""
    return X25519PrivateKey.from_private_bytes(for_purpose(seed, b"mask key"))


def share_key(root: bytes) -> X25519PrivateKey:
    """Return the private key with which a device agrees on keys for sealed shares."""
    return X25519PrivateKey.from_private_bytes(for_purpose(root, b"share key"))


def public(key: X25519PrivateKey) -> bytes:
    """Return the public key as 32 bytes."""
    return key.public_key().public_bytes_raw()


def agreed(key: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret that both holders of these keys agree on; `for_purpose` makes keys of it.

    Raises:
        UpdateRefused: `other` is no public key.
    """
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise UpdateRefused("a device of the cohort has sent a key that is none") from None


def shares_of(root: bytes, threshold: int, count: int) -> list[bytes]:
    """Return a device's shares 1, 2, ...: each is the share of its self seed, then that of its pair seed."""
    single = split(self_seed(root), _coefficients(root, b"self", threshold), count)
    pair = split(pair_seed(root), _coefficients(root, b"pair", threshold), count)
    return [one + other for one, other in zip(single, pair, strict=True)]


def _coefficients(root: bytes, purpose: bytes, threshold: int) -> list[int]:
    if threshold < 2:
        return []
    length = (threshold - 1) * _COEFFICIENT_BYTES
    pieces = HKDFExpand(SHA256(), length, b"attune secure aggregation shares " + purpose).derive(root)
    return [
        int.from_bytes(pieces[start : start + _COEFFICIENT_BYTES], "big") % PRIME
        for start in range(0, length, _COEFFICIENT_BYTES)
    ]


def seal(shares: bytes, key: bytes, context: bytes) -> bytes:
    """Encrypt a pair of shares for the device that has agreed on `key`."""
    return ChaCha20Poly1305(key).encrypt(_NO_NONCE, shares, context)


def opened(sealed: bytes, key: bytes, context: bytes) -> bytes:
    """Return what `seal` encrypted.

    Raises:
        UpdateRefused: It is something else.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NO_NONCE, sealed, context)
    except (InvalidTag, ValueError):
        raise UpdateRefused("a share is not what another device has sealed for this one") from None


def pair_masks(name: str, key: X25519PrivateKey, others: Mapping[str, bytes], context: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the mask's seed that a device shares with each other device, and whether this device subtracts it.

    Args:
        name: The device.
        key: Its mask key.
        others: Public mask keys of the other devices, by name.
        context: The attempt.
    """
    for other, its_key in sorted(others.items()):
        yield for_purpose(agreed(key, its_key), b"pair mask " + context), name > other


def mask_ciphers(seeds: Sequence[tuple[bytes, bool]], part: str) -> list[tuple[AES128, bool]]:
    """Return AES with the key of each mask of a part, and whether the mask is subtracted; `seeds` has the masks' seeds."""
    purpose = b"aes-128 mask of " + part.encode()
    return [(AES128(for_purpose(seed, purpose, _MASK_KEY_BYTES)), subtract) for seed, subtract in seeds]


def _keystream(cipher: AES128, tensor: int) -> CipherContext:
    """Return a cipher in counter mode; each tensor has 2^32 blocks, 64 GB.

    Galois/counter mode encrypts by counter mode. Its tag is not made. It is here because OpenSSL has the widest instructions
    for it: a mask takes 0.34 ms for 0.44 of plain counter mode, on a processor with VAES.
    """
    return Cipher(cipher, GCM(tensor.to_bytes(12, "big"))).encryptor()


def stream(seed: bytes, purpose: str, length: int) -> bytes:
    """Return so many bytes of a mask that is no tensor's."""
    key = for_purpose(seed, b"aes mask of " + purpose.encode())
    return Cipher(AES256(key), CTR(bytes(16))).encryptor().update(bytes(length))


def add_masks(numbers_N: np.ndarray, ciphers: Sequence[tuple[AES128, bool]], tensor: int) -> None:
    """Add the masks of one tensor to its numbers, in place and modulo 2^32.

    Args:
        numbers_N: (N,) uint32.
        ciphers: Those of `mask_ciphers` for the part.
        tensor: The tensor's number in the part.
    """
    import numpy as np  # quick commands of the server read plans, and masks of plain numbers, without it

    most = min(len(numbers_N), PIECE)
    zeros_B, stream_B = memoryview(bytes(4 * most)), bytearray(4 * most)
    stream_N = np.frombuffer(stream_B, dtype="<u4")
    streams = [(_keystream(cipher, tensor), np.subtract if subtract else np.add) for cipher, subtract in ciphers]
    for start in range(0, len(numbers_N), PIECE):
        piece_N = numbers_N[start : start + PIECE]
        count = len(piece_N)
        for keystream, combine in streams:
            keystream.update_into(zeros_B[: 4 * count], stream_B)
            combine(piece_N, stream_N[:count], out=piece_N)


def total_mask(seeds: Sequence[tuple[bytes, bool]], part: str, tensor: int, size: int) -> np.ndarray:
    """Return the sum of the masks of one tensor modulo 2^32, (size,) uint32.

    Args:
        seeds: Seed of each mask, and whether the mask is subtracted.
        part: The part.
        tensor: The tensor's number in the part.
        size: How many numbers it has.
    """
    import numpy as np

    total_N = np.zeros(size, dtype=np.uint32)
    add_masks(total_N, mask_ciphers(seeds, part), tensor)
    return total_N


def split(secret: bytes, coefficients: Sequence[int], shares: int) -> list[bytes]:
    """Return the shares 1, 2, ... of a secret.

    Args:
        secret: SECRET_BYTES bytes.
        coefficients: One random number below PRIME less than the threshold: the polynomial above its constant, the secret.
        shares: How many shares.
    """
    highest_first = [*reversed(coefficients), int.from_bytes(secret, "big")]
    values = []
    for x in range(1, shares + 1):
        value = 0
        for coefficient in highest_first:
            value = value * x + coefficient  # x is small: one remainder at the end takes less time than one a step
        values.append((value % PRIME).to_bytes(SHARE_BYTES, "big"))
    return values


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Return Lagrange's weight of each of these shares' numbers for the value at 0. They are the same for all secrets."""
    weights = []
    for x in points:
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return weights


def combine(shares: Mapping[int, bytes], weights: Sequence[int]) -> bytes:
    """Return the secret.

    Args:
        shares: Shares by number, as many as the threshold.
        weights: Those of `weights_at_zero` for these numbers, in this order.

    Raises:
        ValueError: The shares are not of one secret.
    """
    values = (int.from_bytes(share, "big") for share in shares.values())
    secret = sum(weight * value for weight, value in zip(weights, values, strict=True)) % PRIME
    if secret >> 8 * SECRET_BYTES:
        raise ValueError("shares of different secrets")
    return secret.to_bytes(SECRET_BYTES, "big")
