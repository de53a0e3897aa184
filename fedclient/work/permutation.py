"""A paired test for any score: whether the mean gain over the same samples can be chance. It needs no normality.

N samples. Where both models are equally good, a sample's gain may as well have had the other sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EXACT = 12  # with so many gains or fewer all signs are tried
DRAWS = 9999  # else so many at random: the smallest p is 1 in 10,000
MANY = 2000  # with more gains than this their sum is normal enough
ROWS = 512  # draws at a time: 512 * 2000 signs are 8 MB


def sign_flip(gains: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """p value, two-sided, of 'gains have mean 0 and are symmetric about it': how often other signs give as large a sum.

    Fisher, The Design of Experiments 1935, section 21; drawn signs are counted as in Phipson and Smyth (Statistical
    Applications in Genetics and Molecular Biology 2010), so the level holds exactly. The same gains have the same p.
    """
    gain_N = np.asarray(gains, dtype=np.float64)
    gain_N = gain_N[gain_N != 0]
    if not len(gain_N):
        return 1.0
    gain_N = gain_N / np.abs(gain_N).max()
    observed = abs(gain_N.sum()) * (1 - 1e-9)  # sums of the same numbers in another order may round apart
    if len(gain_N) <= EXACT:
        sign_SN = 1 - 2 * (np.arange(1 << len(gain_N))[:, None] >> np.arange(len(gain_N)) & 1)
        return float((np.abs(sign_SN @ gain_N) >= observed).mean())
    if len(gain_N) > MANY:
        return math.erfc(observed / math.sqrt(2 * float(gain_N @ gain_N)))
    return (1 + _as_large(gain_N, observed)) / (1 + DRAWS)


def _as_large(gain_N: npt.NDArray[np.float64], observed: float) -> int:
    """In how many of the draws the sum is as large."""
    draw, found = np.random.default_rng(len(gain_N)), 0
    for first in range(0, DRAWS, ROWS):
        rows = min(ROWS, DRAWS - first)
        sign_RN = 1 - 2 * draw.integers(0, 2, (rows, len(gain_N)), dtype=np.int8)
        found += int((np.abs(sign_RN @ gain_N) >= observed).sum())
    return found
