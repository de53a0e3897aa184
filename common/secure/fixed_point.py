"""Updates as whole numbers, so that masks can be added and sums are exact.

For a clipping bound c and a weight w of at most 1, a number x becomes x * w * 2^20 / c, rounded at random to one of its
neighbours with the right mean (to 2^-16 of their distance). The sum of up to 2^10 devices fits into 31 bits and a sign.
"""

from __future__ import annotations

import numpy as np
import torch

ONE = 1 << 20  # stands for the clipping bound, and for the weight 1
_PIECE = 1 << 15  # numbers that stay in the cache


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
