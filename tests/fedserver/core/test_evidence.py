"""Evidence for each device against a direct integration in float64 by scipy, and on fleets that were worked out by hand."""

import math

import numpy as np
import pytest

from attune.fedserver.core import evidence
from attune.fedserver.core.evidence import Belief, beliefs_of_counts, beliefs_of_gains
from tests.needs import Later

stats = Later("scipy.stats")


def direct_counts(counts):
    """Integrate over the grid device by device, without logarithms and without joining equal devices."""
    weights, shares = [], []
    for w in evidence.SPIKE:
        for m in evidence.MEANS:
            for s in evidence.STRENGTHS:
                a, b = m * s, (1 - m) * s
                likelihood, row = 1.0, []
                for won, lost in counts:
                    spike = stats.binom.pmf(won, won + lost, 0.5)
                    slab = stats.betabinom.pmf(won, won + lost, a, b)
                    both = w * spike + (1 - w) * slab
                    likelihood *= both
                    above = stats.beta.sf(0.5, won + a, lost + b)
                    row.append(((1 - w) * slab * above / both, (1 - w) * slab * (1 - above) / both))
                weights.append(likelihood)
                shares.append(row)
    return np.tensordot(np.array(weights) / sum(weights), np.array(shares), 1)


def test_beliefs_of_counts_agree_with_a_direct_integration(monkeypatch):
    monkeypatch.setattr(evidence, "MEANS", np.array([0.1, 0.4, 0.8]))
    monkeypatch.setattr(evidence, "STRENGTHS", np.array([1.0, 20.0, 300.0]))
    counts = [(7, 1), (7, 1), (0, 0), (2, 5), (40, 12), (0, 9)]
    beliefs = beliefs_of_counts(counts)
    assert np.array([(belief.better, belief.worse) for belief in beliefs]) == pytest.approx(direct_counts(counts), abs=1e-9)


def test_beliefs_of_gains_agree_with_a_direct_integration(monkeypatch):
    monkeypatch.setattr(evidence, "CENTRES", np.array([-1.0, 0.5]))
    monkeypatch.setattr(evidence, "SPREADS", np.array([0.5, 4.0]))
    gains = [(0.2, 0.1, 8), (-0.05, 0.1, 20), (0.4, 0.2, 12)]  # the median error is 0.1
    weights, shares, true = [], [], np.linspace(-60, 60, 60_001) * 0.1
    seen = [(stats.t.pdf((gain - true) / e, n - 1) / e, stats.t.pdf(gain / e, n - 1) / e) for gain, e, n in gains]
    for c in evidence.CENTRES:
        for d in evidence.SPREADS * 0.1:
            prior, slabs = stats.norm.pdf(true, c * d, d), []
            for if_true, spike in seen:
                slab = np.trapezoid(if_true * prior, true)
                slabs.append((spike, slab, np.trapezoid(np.where(true > 0, if_true * prior, 0), true) / slab))
            for w in evidence.SPIKE:
                likelihood, row = 1.0, []
                for spike, slab, above in slabs:
                    both = w * spike + (1 - w) * slab
                    likelihood *= both
                    row.append(((1 - w) * slab * above / both, (1 - w) * slab * (1 - above) / both))
                weights.append(likelihood)
                shares.append(row)
    expected = np.tensordot(np.array(weights) / sum(weights), np.array(shares), 1)
    beliefs = beliefs_of_gains(gains)
    assert np.array([(belief.better, belief.worse) for belief in beliefs]) == pytest.approx(expected, abs=2e-3)


def test_devices_without_any_difference_are_equally_good():
    [belief] = beliefs_of_counts([(0, 0)])
    assert belief.better == pytest.approx(belief.worse, abs=1e-12) and belief.better + belief.worse < 1
    assert beliefs_of_counts([]) == []


def test_other_devices_lend_strength_and_take_it():
    """Six of seven samples are too few alone and among devices without effect, and enough in a fleet of helped devices."""
    [alone] = beliefs_of_counts([(6, 1)])
    among_helped = beliefs_of_counts([(6, 1)] + [(14, 3)] * 15)[0]
    among_equal = beliefs_of_counts([(6, 1)] + [(8, 8), (7, 9), (9, 7)] * 5)[0]
    assert among_equal.better < alone.better < among_helped.better
    assert among_helped.effect() == "helped" and alone.effect() is None and among_equal.effect() is None


def test_harm_is_the_mirror_image_of_help():
    counts = [(12, 1), (3, 9), (5, 5), (0, 4)]
    for belief, mirrored in zip(beliefs_of_counts(counts), beliefs_of_counts([(c, b) for b, c in counts]), strict=True):
        assert (belief.better, belief.worse) == pytest.approx((mirrored.worse, mirrored.better))
    gains = [(0.3, 0.1, 9), (-0.1, 0.2, 30), (0.0, 0.1, 7)]
    for belief, mirrored in zip(beliefs_of_gains(gains), beliefs_of_gains([(-g, e, n) for g, e, n in gains]), strict=True):
        assert (belief.better, belief.worse) == pytest.approx((mirrored.worse, mirrored.better))


def test_gains_in_another_unit_give_the_same_beliefs():
    gains = [(0.3, 0.1, 9), (-0.1, 0.2, 30), (0.05, 0.1, 7)]
    for belief, scaled in zip(beliefs_of_gains(gains), beliefs_of_gains([(9 * g, 9 * e, n) for g, e, n in gains]), strict=True):
        assert (belief.better, belief.worse) == pytest.approx((scaled.better, scaled.worse))


def test_gains_without_any_spread_are_finite():
    for belief in beliefs_of_gains([(0.0, 0.0, 6), (0.5, 0.0, 6), (-1e100, 1e100, 6)]):
        assert all(math.isfinite(value) for value in (belief.better, belief.worse))


def test_a_call_needs_the_threshold_and_enough_samples():
    assert Belief(0.96, 0.0).effect() == "helped" and Belief(0.0, 0.96).effect() == "harmed"
    assert Belief(0.94, 0.0).effect() is None and Belief(0.96, 0.0).effect(enough=False) is None


def test_few_calls_are_wrong_on_fleets_with_known_effects():
    """The bound is that of the calibration (benchmarks/results/evidence.csv), on other fleets of the same kinds."""
    draw = np.random.default_rng(11)
    for none, most in ((1.0, 0.002), (0.5, 0.05), (0.3, 0.05)):  # of all devices where there is no effect, else of the calls
        called = wrong = 0
        for _ in range(40):
            share = np.where(draw.random(20) < none, 0.5, draw.beta(16, 4, 20))
            discordant = draw.binomial(30, 0.4, 20)
            won = draw.binomial(discordant, share)
            counts = list(zip(won.tolist(), (discordant - won).tolist(), strict=True))
            for (b, c), belief, true in zip(counts, beliefs_of_counts(counts), share, strict=True):
                if call := belief.effect(abs(b - c) >= evidence.LEAST_DIFFERENCE):
                    called += 1
                    wrong += true <= 0.5 if call == "helped" else true >= 0.5
        assert wrong <= most * (called if none < 1 else 800), (none, called, wrong)
        assert none == 1 or called > 100
