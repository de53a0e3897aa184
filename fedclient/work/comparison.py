"""Comparison of the device's own model with its rivals, on the same test samples, and the paired test for it.

N samples. Where both models are equally good, a sample's gain may as well have had the other sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.metrics import RivalMetrics
from attune.common.statistics import Pair, pairs_of
from attune.fedclient.messages import OrderResult

Places = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
LOWEST = -1.0  # of a mean score that is reported: one device that diverged must not hide all others in a mean


def comparisons_of(result: OrderResult) -> list[Pair]:
    """Return a comparison for each rival; empty if nothing was compared, or without test samples."""
    return pairs_of(msgspec.structs.asdict(result)) if result.test_samples else []


def compared(
    scored: npt.ArrayLike, rival_scored: npt.ArrayLike, names: RivalMetrics, groups: Places | None = None
) -> dict[str, float]:
    """Return what is reported of a model against a rival: numbers of Metrics, as common.statistics reads them.

    Positions of a sequence are not independent, so a sequence counts once. A group of samples counts once for the same reason.
    The gain is the difference of the mean scores as they are reported, so it is 2 at most, also over a model that diverged.

    Args:
        scored: Which labels the model predicts, (N,) or (N, T) bool, or scores (N,); an array, or a tensor on the CPU.
        rival_scored: The same for the rival.
        names: The names of the reported numbers: of RIVALS or KEPT_RIVALS.
        groups: The group of each sample as a number from 0 on, (N,).
    """
    right, rival_right = np.asarray(scored), np.asarray(rival_scored)
    gain_N = _differences(right, rival_right)
    counts: dict[str, float] = {names.better: int((gain_N > 0).sum()), names.worse: int((gain_N < 0).sum())}
    if right.dtype.kind != "f" and right.ndim == 1 and groups is None:
        return counts
    p = sign_flip(by_group(gain_N, groups))
    gain_N = _differences(_within_lowest(right), _within_lowest(rival_right))
    gain, gain_G = float(gain_N.mean()), by_group(gain_N, groups)
    sizes = np.ones(len(gain_N)) if groups is None else np.bincount(groups)
    known: dict[str, float] = {} if groups is None else {"test_groups": len(gain_G)}
    return counts | known | {names.gain: gain, names.error: _error(gain_G, sizes, gain), names.p: p}


def _differences(right: npt.NDArray[Any], rival_right: npt.NDArray[Any]) -> Floats:
    return np.asarray((right.astype(np.float64) - rival_right.astype(np.float64)).reshape(len(right), -1).mean(axis=1))


def by_group(gain_N: Floats, groups: Places | None) -> Floats:
    """Return the sum of the gains of each group, (G,); without groups the gains."""
    return gain_N if groups is None else np.bincount(groups, gain_N).astype(float)


def _within_lowest(right: npt.NDArray[Any]) -> Floats:
    """Return scores with a mean of LOWEST at least.

    All distances from the best score, 1, shrink alike. One device with a model that diverged would otherwise hide all others in
    a mean of gains over devices.
    """
    scores = right.astype(np.float64)
    mean = float(scores.mean())
    return scores if mean >= LOWEST else 1 - (1 - scores) * ((1 - LOWEST) / (1 - mean))


def _error(sum_G: Floats, size_G: npt.NDArray[Any], mean: float) -> float:
    """Return the standard error of a mean over samples in G independent groups (Liang and Zeger, Biometrika 1986).

    If each group is a sample, it is the usual one. With one group it is 0.
    """
    groups = len(sum_G)
    spread = float(np.square(sum_G - size_G * mean).sum()) * groups / max(1, groups - 1)
    return math.sqrt(spread) / float(size_G.sum()) if groups > 1 else 0.0


EXACT = 12  # most gains of which all signs are tried
DRAWS = 9999  # random signs for more gains: the smallest p is 1 in 10,000
MANY = 2000  # most gains of which signs are drawn; for more, the sum is taken as normal
ROWS = 512  # draws at a time: 512 * 2000 signs are 8 MB


def sign_flip(gains: Sequence[float] | Floats) -> float:
    """Return the two-sided p-value of 'gains have mean 0 and are symmetric about it'.

    It is how often other signs give as large a sum (Fisher, The Design of Experiments 1935, section 21). Drawn signs are
    counted as in Phipson and Smyth (Statistical Applications in Genetics and Molecular Biology 2010), so the level holds
    exactly. Equal gains have equal p-values.
    """
    gain_N = np.asarray(gains, dtype=np.float64)
    gain_N = gain_N[gain_N != 0]
    if not len(gain_N):
        return 1.0
    gain_N = gain_N / np.abs(gain_N).max()
    observed = max(0.0, abs(gain_N.sum()) - 1e-9)  # sums of the same numbers in another order may round apart, also about 0
    if len(gain_N) <= EXACT:
        sign_SN = 1 - 2 * (np.arange(1 << len(gain_N))[:, None] >> np.arange(len(gain_N)) & 1)
        return float((np.abs(sign_SN @ gain_N) >= observed).mean())
    if len(gain_N) > MANY:
        return math.erfc(observed / math.sqrt(2 * float(gain_N @ gain_N)))
    return (1 + _as_large(gain_N, observed)) / (1 + DRAWS)


def _as_large(gain_N: Floats, observed: float) -> int:
    """Return in how many draws the sum is as large."""
    draw, count = np.random.default_rng(len(gain_N)), 0
    for first in range(0, DRAWS, ROWS):
        rows = min(ROWS, DRAWS - first)
        sign_RN = 1 - 2 * draw.integers(0, 2, (rows, len(gain_N)), dtype=np.int8)
        count += int((np.abs(sign_RN @ gain_N) >= observed).sum())
    return count
