"""Whether the device's own model is better than its rivals, by the answers that they gave to the same test samples."""

from __future__ import annotations

import math

import msgspec
import torch

from attune.common.metrics import Choice
from attune.common.paired import Pair, findings_of, pairs_of
from attune.common.statistics import Finding, overall
from attune.fedclient.messages import Result
from attune.fedclient.work.permutation import sign_flip


def comparisons_of(result: Result) -> list[Pair]:
    """One for each rival; none where nothing was compared or there are no test samples."""
    return pairs_of(msgspec.structs.asdict(result)) if result.test_samples else []


def finding_of(comparisons: list[Pair]) -> Finding:
    """Worse, if the own model is worse than any rival; better, if it is better than every rival; else unclear."""
    return overall(findings_of(comparisons).values())


def compared(own: torch.Tensor, rival: torch.Tensor, name: Choice) -> dict[str, float]:
    """What is reported of the own model against the rival `name`: numbers of Metrics, as common.paired reads them.

    Arguments: which labels each finds, (N,) or (N, T) bool, or scores (N,). The positions of a sequence are not independent, so
    a sequence counts once.
    """
    gain_N = (own.double() - rival.double()).reshape(len(own), -1).mean(dim=1)
    found: dict[str, float] = {f"better_than_{name}": int((gain_N > 0).sum()), f"worse_than_{name}": int((gain_N < 0).sum())}
    if own.dtype == torch.bool and own.ndim == 1:
        return found
    error = float(gain_N.std()) / math.sqrt(len(gain_N)) if len(gain_N) > 1 else 0.0
    return found | {f"gain_{name}": float(gain_N.mean()), f"error_{name}": error, f"p_{name}": sign_flip(gain_N.numpy())}
