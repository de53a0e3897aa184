"""Mathematics of survival: the Cox loss of a batch, and Harrell's C-index.

A sample has a time, and an event: 1 if it happened at that time, 0 if the sample was last seen then without it (censored).
N samples, B of a batch, G different times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cox_loss(risk_B: Tensor, time_B: Tensor, event_B: Tensor) -> Tensor:
    """Return the negative partial log-likelihood of a batch over its number of events, a scalar.

    The risk set of an event is the samples of the batch whose time is not shorter (Cox, J. of the Royal Statistical Society B
    1972). Events at one time share it as Efron says (J. of the American Statistical Association 1977). Without an event it is
    0, with gradients of 0.

    Args:
        risk_B: Log hazard of each sample, up to a constant.
        time_B: Times.
        event_B: 1 or 0.
    """
    risk_B = risk_B.to(torch.promote_types(risk_B.dtype, torch.float32))
    happened_B = event_B > 0
    if not bool(happened_B.any()):
        return risk_B.sum() * 0.0
    order_B = torch.argsort(time_B, descending=True, stable=True)
    risk_B, happened_B = risk_B[order_B], happened_B[order_B]
    _, group_B, size_G = torch.unique_consecutive(time_B[order_B], return_inverse=True, return_counts=True)
    at_risk_G = risk_B.logcumsumexp(dim=0)[size_G.cumsum(dim=0) - 1]  # log of the summed hazards of each risk set
    group_E, risk_E = group_B[happened_B], risk_B[happened_B]
    # Of d events at one time the i-th (from 0) no longer has i/d of these events in its risk set.
    events_G = torch.bincount(group_E, minlength=len(size_G))
    place_E = torch.arange(len(group_E), device=group_E.device) - (events_G.cumsum(dim=0) - events_G)[group_E]
    tied_G = torch.zeros_like(at_risk_G).index_add(0, group_E, (risk_E - at_risk_G[group_E]).exp())
    gone_E = place_E.to(risk_B.dtype) / events_G[group_E] * tied_G[group_E]
    return (at_risk_G[group_E] + torch.log1p(-gone_E) - risk_E).mean()


def c_index(risk_N: Tensor, time_N: Tensor, event_N: Tensor) -> float:
    """Return the share of comparable pairs in which the earlier event has the higher risk; equal risks count half.

    A pair is comparable if the event of one happened before the time of the other, or at the time at which the other was
    censored (Harrell, Califf, Pryor, Lee, Rosati, JAMA 1982). NaN without such a pair. A risk of NaN is never right.

    Args:
        risk_N: Log hazard of each sample, or any score that grows with it.
        time_N: Times.
        event_N: 1 or 0.
    """
    place_N, happened_N, no_risk_N = _places(time_N, event_N), event_N > 0, risk_N.isnan()
    rank_N = torch.unique(risk_N.nan_to_num(nan=0.0), return_inverse=True)[1] + 1
    beyond = int(rank_N.max()) + 1 if len(rank_N) else 1
    high_N, low_N = rank_N.masked_fill(no_risk_N, 0), rank_N.masked_fill(no_risk_N, beyond)
    at_once_N = place_N * (beyond + 1) + low_N
    order_N = at_once_N.argsort()
    below, equal = _inversions(high_N[order_N], low_N[order_N], happened_N[order_N], beyond + 1)
    # Events at one time are not comparable. They are in the order of their risks, so only equal ones were counted.
    runs = torch.unique(at_once_N[happened_N & ~no_risk_N], return_counts=True)[1]
    right = below + (equal - int((runs * (runs - 1)).sum()) // 2) / 2
    behind_E = len(place_N) - torch.searchsorted(place_N.sort()[0], place_N[happened_N].contiguous(), right=True)
    return right / total if (total := int(behind_E.sum())) else math.nan


def has_pairs(time_N: Tensor, event_N: Tensor) -> bool:
    """Return whether two samples are comparable, so that there is a C-index."""
    place_N = _places(time_N, event_N)
    return bool((place_N[event_N > 0] < place_N.max()).any()) if len(place_N) else False


def _places(time_N: Tensor, event_N: Tensor) -> Tensor:
    """Return whole numbers, (N,): an event is comparable with the samples that have a higher one."""
    place_N: Tensor = torch.unique(time_N, return_inverse=True)[1]
    return 2 * place_N + (event_N <= 0)


def _inversions(high_N: Tensor, low_N: Tensor, counts_N: Tensor, width: int) -> tuple[int, int]:
    """Return how many pairs of a sample that counts and a later one have a smaller number there, and how many an equal one.

    It compares the two halves of blocks of 2, 4, 8, ... samples, as merge sort does, so that it takes N log(N)^2 steps.

    Args:
        high_N: Number of a sample as the first of a pair, below `width`.
        low_N: Number of a sample as the second of a pair, below `width`.
        counts_N: Whether a sample may be the first of a pair.
        width: Bound of the numbers.
    """
    below = equal = 0
    at_N, half = torch.arange(len(high_N), device=high_N.device), 1
    while half < len(high_N):
        base_N, is_second_N = at_N // (2 * half) * width, at_N // half % 2 == 1
        second = (base_N + low_N)[is_second_N].sort()[0]
        first_N = ~is_second_N & counts_N
        before, least = (torch.searchsorted(second, key_N[first_N]) for key_N in (base_N, base_N + high_N))
        most = torch.searchsorted(second, (base_N + high_N)[first_N], right=True)
        below, equal = below + int((least - before).sum()), equal + int((most - least).sum())
        half *= 2
    return below, equal
