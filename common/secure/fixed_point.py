"""Updates as whole numbers, so that masks can be added and sums are exact.

For a clipping bound c and a weight w of at most 1, a number x becomes x * w * 2^20 / c, rounded at random to one of its
neighbours with the right mean (to 2^-16 of their distance). The sum of up to 2^10 devices fits into 31 bits and a sign.

Sums over samples become whole numbers of EXACT_BYTES, in units of 2^-80, cut off towards 0. Sums of up to 2^8 fit into them.
"""

from __future__ import annotations

import numpy as np
import torch

from attune.common.errors import UpdateRefused

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
