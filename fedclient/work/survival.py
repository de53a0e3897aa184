"""Mathematics of survival: the Cox loss of a batch, and Harrell's C-index.

A sample has a time, and an event: 1 if it happened at that time, 0 if the sample was last seen then without it (censored).
N samples, B of a batch, G different times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PAIRS = 1 << 22  # most pairs of samples in memory at a time


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
    right = total = 0.0
    for first_E, pairs_EN in _comparable(time_N, event_N):
        risk_E1 = risk_N[first_E, None]
        right += float(((risk_E1 > risk_N) & pairs_EN).sum()) + 0.5 * float(((risk_E1 == risk_N) & pairs_EN).sum())
        total += float(pairs_EN.sum())
    return right / total if total else math.nan


def has_pairs(time_N: Tensor, event_N: Tensor) -> bool:
    """Return whether two samples are comparable, so that there is a C-index."""
    return any(bool(pairs_EN.any()) for _, pairs_EN in _comparable(time_N, event_N))


def _comparable(time_N: Tensor, event_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places of some samples with an event, and for each of them which samples are comparable with it, (E, N)."""
    happened_N = event_N > 0
    for first_E in happened_N.nonzero()[:, 0].split(max(1, PAIRS // max(1, len(time_N)))):
        time_E1 = time_N[first_E, None]
        yield first_E, (time_E1 < time_N) | ((time_E1 == time_N) & ~happened_N)
