"""Evidence for each device of a fleet that its model is better than a rival, with strength borrowed from the other devices.

One device has few test samples, so its own test is often unclear. The gains of a fleet's devices resemble each other, and this
model of the whole fleet uses that: some devices gain exactly 0 (the spike), and the gains of the others come from one
distribution. Its parameters are integrated over a grid and never fitted: a fitted prior calls devices helped where there is no
effect. The grid and the threshold were fixed on simulated fleets (benchmarks/evidence.py) before any real one was judged.
The strict test of `common.statistics` stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from attune.common.statistics import HelpOrHarm

Floats = NDArray[np.float64]

SPIKE = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])  # shares of devices without any effect
MEANS = (np.arange(24) + 0.5) / 24  # mean of the discordant samples' share, uniform on (0, 1)
STRENGTHS = np.geomspace(1, 300, 16)  # a + b of its beta distribution, log-uniform
CENTRES = np.linspace(-3, 3, 13)  # mean of the gains, in deviations of the gains
SPREADS = np.geomspace(0.25, 16, 13)  # deviation of the gains, in median standard errors
STEP, REACH = 0.1, 12.0  # of the integral over a gain's error, in standard errors
LEAST_DIFFERENCE = 2  # samples: a smaller difference says nothing
LEAST_GROUPS = 6  # fewer independent groups say too little about their own spread
THRESHOLD = 0.95


class Belief(msgspec.Struct, frozen=True):
    """Probabilities that a device's model is better than the rival, and worse; the rest says that they are equally good."""

    better: float
    worse: float

    def effect(self, enough: bool = True, threshold: float = THRESHOLD) -> HelpOrHarm | None:
        """Return whether the device is probably helped or probably harmed; None if the evidence is too weak."""
        if not enough:
            return None
        return "helped" if self.better >= threshold else "harmed" if self.worse >= threshold else None


def beliefs_of_counts(counts: Sequence[tuple[int, int]]) -> list[Belief]:
    """Return the belief about each device, from samples on which only its model or only the rival is right.

    With b and c such samples, b ~ Binomial(b + c, π). π is 1/2 with probability w, else Beta(m s, (1 - m) s).

    Args:
        counts: b and c of each device.
    """
    kinds, places, many = np.unique(np.array(counts, np.int64).reshape(-1, 2), axis=0, return_inverse=True, return_counts=True)
    won, lost = kinds[:, :1].astype(float), kinds[:, 1:].astype(float)
    mean, strength = (grid.reshape(1, -1) for grid in np.meshgrid(MEANS, STRENGTHS))
    a, b = mean * strength, (1 - mean) * strength
    slab = _log_beta(won + a, lost + b) - _log_beta(a, b)  # binomial coefficients cancel
    above = 1 - _below_half(won + a, lost + b)
    return _beliefs(-(won + lost) * math.log(2), slab, above, 1 - above, places.reshape(-1), many.astype(float))


def beliefs_of_gains(gains: Sequence[tuple[float, float, int]]) -> list[Belief]:
    """Return the belief about each device, from mean gains whose errors follow Student's t.

    A device's true gain is 0 with probability w, else Normal(c d, d²) with d in units of the fleet's median standard error.

    Args:
        gains: Mean gain, its standard error, and the number of independent groups of each device, at least 2.
    """
    gain, error, groups = (np.array(column, float).reshape(-1, 1) for column in zip(*gains, strict=True))
    unit = float(np.median(error[error > 0])) if (error > 0).any() else 1.0
    gain, error = gain / unit, np.maximum(error / unit, 1e-3)  # a gain without any spread is not infinitely certain
    centre, spread = (grid.reshape(1, -1) for grid in np.meshgrid(CENTRES, SPREADS))
    slab, above, below = (np.empty((len(gain), centre.size)) for _ in range(3))
    steps = np.arange(-REACH, REACH + STEP / 2, STEP)
    for i in range(len(gain)):
        true = (gain[i] - error[i] * steps)[:, None]  # (S, 1), (S, G) below
        normal = np.exp(-0.5 * ((true - centre * spread) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))
        mass = normal * np.exp(_log_student(steps, groups[i] - 1))[:, None] * STEP
        total = mass.sum(0) + 1e-300
        slab[i] = np.log(total)
        positive = np.clip(true / (error[i] * STEP) + 0.5, 0, 1)  # the part of each step that is above 0
        above[i], below[i] = (mass * positive).sum(0) / total, (mass * (1 - positive)).sum(0) / total
    spike = _log_student(gain / error, groups - 1) - np.log(error)
    return _beliefs(spike, slab, above, below, np.arange(len(gain)), np.ones(len(gain)))


def _beliefs(
    spike: Floats, slab: Floats, above: Floats, below: Floats, places: NDArray[np.int64], many: Floats
) -> list[Belief]:
    """Return the belief about each device after all of them together have weighed the points of the grid.

    Args:
        spike: Log-likelihood of each kind of device without effect, (K, 1).
        slab: Log-likelihood at each point of the grid with an effect, (K, G).
        above: Probability of a positive effect there, (K, G).
        below: Probability of a negative effect there, (K, G).
        places: Kind of each device.
        many: Number of devices of each kind, (K,).
    """
    with np.errstate(divide="ignore"):
        effect, none = np.log1p(-SPIKE), np.log(SPIKE)
    better, worse = np.zeros(len(slab)), np.zeros(len(slab))

    def log_of(k: int) -> Floats:  # computed twice, because all of them at once would not fit in memory for a large fleet
        return np.asarray(np.logaddexp(none[k] + spike, effect[k] + slab), np.float64)  # (K, G)

    points = np.array([many @ log_of(k) for k in range(len(SPIKE))])  # (W, G)
    weight = np.exp(points - points.max())
    weight /= weight.sum()
    for k in range(len(SPIKE)):
        share = np.exp(effect[k] + slab - log_of(k)) * weight[k]  # that a device of this kind has an effect, and this point
        better += (share * above).sum(1)
        worse += (share * below).sum(1)
    return [Belief(float(better[kind]), float(worse[kind])) for kind in places]


_log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])


def _log_beta(a: Floats, b: Floats) -> Floats:
    return np.asarray(_log_gamma(a) + _log_gamma(b) - _log_gamma(a + b))


def _below_half(a: Floats, b: Floats) -> Floats:
    """Return the probability that Beta(a, b) is below 1/2.

    The series has positive terms, and converges fast if a is at least b: Handbook of Mathematical Functions, 26.5.4.
    """
    high, low = np.maximum(a, b), np.minimum(a, b)
    term = np.exp(-(high + low) * math.log(2) - np.log(high) - _log_beta(high, low))
    total, k = term.copy(), 0
    while (term > 1e-12).any():
        term = term * (high + low + k) / (high + 1 + k) / 2
        total += term
        k += 1
    return np.asarray(np.where(a >= b, total, 1 - total), np.float64)


def _log_student(t: Floats, freedom: Floats) -> Floats:
    """Return the log-density of Student's t."""
    constant = _log_gamma((freedom + 1) / 2) - _log_gamma(freedom / 2) - 0.5 * np.log(freedom * math.pi)
    return np.asarray(constant - (freedom + 1) / 2 * np.log1p(t * t / freedom), np.float64)
