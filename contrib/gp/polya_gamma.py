"""Polya-Gamma variables PG(1, c): Polson, Scott, Windle, JASA 2013.

N variables of any shape, T terms of the series.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 64


def draw(c_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one PG(1, c) for every element of c_N (float64), of the same shape and on its device; `generator` is on the CPU.

    The definition: sum over k >= 1 of g_k / (2 pi^2 ((k - 1/2)^2 + (c / 2 pi)^2)), g_k exponential of mean 1. The first TERMS
    are drawn, and the rest is replaced by its mean. So the mean is exact, and the variance too small by at most
    1 / (12 pi^4 TERMS^3) = 3.3e-9 for every c: below 1e-7 of the variance 1/24 at c = 0, below 1% for |c| up to 100.
    """
    c_N1 = c_N.unsqueeze(-1)
    place_T = torch.arange(1, TERMS + 1, dtype=torch.float64, device=c_N.device) - 0.5
    scale_NT = 1 / (2 * math.pi**2 * (place_T.square() + (c_N1 / (2 * math.pi)).square()))
    uniform_NT = torch.rand(scale_NT.shape, dtype=torch.float64, generator=generator).to(c_N.device)
    drawn_NT = -torch.log1p(-uniform_NT)
    return mean(c_N) + (scale_NT * (drawn_NT - 1)).sum(dim=-1)


def mean(c_N: Tensor) -> Tensor:
    """Return the mean of PG(1, c): tanh(c / 2) / (2 c), and its limit 1/4 at 0."""
    half_N = c_N.abs() / 2
    safe_N = half_N.clamp(min=1e-4)
    return torch.where(half_N < 1e-4, 0.25 - half_N.square() / 12, safe_N.tanh() / (4 * safe_N))
