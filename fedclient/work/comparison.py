"""Whether the device's own model is better than its rivals, by the answers that they gave to the same test samples."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from attune.common.metrics import RIVALS, Rival
from attune.common.paired import Pair, findings_of, pairs_of
from attune.common.statistics import Finding, overall
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.permutation import sign_flip

Places = npt.NDArray[np.intp]


def comparisons_of(result: OrderResult) -> list[Pair]:
    """One for each rival; none where nothing was compared or there are no test samples."""
    return pairs_of(msgspec.structs.asdict(result)) if result.test_samples else []


def finding_of(comparisons: list[Pair]) -> Finding:
    """Worse, if the own model is worse than any rival; better, if it is better than every rival; else unclear."""
    return overall(findings_of(comparisons).values())


def compared(own: torch.Tensor, rival: torch.Tensor, name: Rival, groups: Places | None = None) -> dict[str, float]:
    """What is reported of the own model against the rival `name`: numbers of Metrics, as common.paired reads them.

    Arguments: which labels each finds, (N,) or (N, T) bool, or scores (N,). The positions of a sequence are not independent, so
    a sequence counts once. groups (N,): places from 0 on; nor are the samples of one group, so a group counts once, too.
    """
    gain_N = (own.double() - rival.double()).reshape(len(own), -1).mean(dim=1).numpy()
    names = RIVALS[name]
    counts: dict[str, float] = {names.better: int((gain_N > 0).sum()), names.worse: int((gain_N < 0).sum())}
    if own.dtype == torch.bool and own.ndim == 1 and groups is None:
        return counts
    gain = float(gain_N.mean())
    by_group = gain_N if groups is None else np.bincount(groups, gain_N).astype(float)
    sizes = np.ones(len(gain_N)) if groups is None else np.bincount(groups)
    return counts | {names.gain: gain, names.error: _error(by_group, sizes, gain), names.p: sign_flip(by_group)}


def _error(sum_G: npt.NDArray[np.float64], size_G: npt.NDArray[Any], mean: float) -> float:
    """The standard error of a mean over samples that come in G independent groups (Liang and Zeger, Biometrika 1986).

    Where each group is a sample it is the usual one; 0 if there is one group.
    """
    groups = len(sum_G)
    spread = float(np.square(sum_G - size_G * mean).sum()) * groups / max(1, groups - 1)
    return math.sqrt(spread) / float(size_G.sum()) if groups > 1 else 0.0
