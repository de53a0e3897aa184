"""Shamir's secret sharing over a prime field: any `threshold` shares give the secret, and fewer say nothing about it.

Shamir, 'How to Share a Secret', CACM 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRIME = 2**255 - 19
SECRET_BYTES = 31  # every number of so many bytes is in the field
SHARE_BYTES = 32


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
