"""Verdict on a fleet, with numbers worked out by hand."""

import math

import numpy as np
import pytest

from attune.common.metrics import KEPT_RIVALS
from attune.fedserver.core import evidence
from attune.fedserver.core.evidence import Belief, beliefs_of_counts, beliefs_of_gains
from attune.fedserver.core.fleet_verdict import effect_of, fleet_verdicts
from attune.fedserver.core.messages import Aggregate, Effect, Open, PassOver, together
from tests.needs import Later


def report(better, worse, samples=20, rival="local", **more):
    names = KEPT_RIVALS[rival]
    return {"test_samples": samples, names.better: better, names.worse: worse} | more


def test_a_fleet_of_three_by_hand():
    [verdict] = fleet_verdicts({"a": report(4, 2), "b": report(6, 0), "c": report(0, 1)})
    # Gains: 0.1, 0.3, -0.05. Their mean is 0.35 / 3, their deviation 0.17559; t of two degrees is 4.3027.
    assert verdict.rival == "local" and verdict.gain == pytest.approx(0.116667, abs=1e-6)
    assert verdict.interval == pytest.approx((0.116667 - 0.436205, 0.116667 + 0.436205), abs=1e-4)
    assert (verdict.better, verdict.worse, verdict.p) == (2, 1, 1.0)
    assert verdict.words().startswith(
        "against a network trained alone: +0.117 on average, 95 % for devices like these -0.320 to +0.553;"
    )


def test_each_rival_has_a_verdict_and_a_device_needs_all_of_them():
    both = report(18, 0) | report(0, 18, rival="common")
    alone = {f"d{i}": report(15, 1) for i in range(6)}
    verdicts = fleet_verdicts({"both": both} | alone)
    assert [verdict.rival for verdict in verdicts] == ["local", "common"]
    assert effect_of(verdicts, "both") == "harmed", "the common model is better than what it keeps"
    assert effect_of(verdicts, "d0") == "helped" and effect_of(verdicts, "nobody") is None
    assert (verdicts[0].helped, verdicts[0].harmed, verdicts[1].harmed) == (7, 0, 1)


def test_ordinary_models_alone_come_first_and_a_common_model_as_good_hides_no_help():
    fleet = {f"d{i}": report(15, 1, rival="alone") | report(1, 1, rival="common") for i in range(6)}
    fleet["hurt"] = report(1, 19, rival="alone") | report(9, 0, rival="common")
    verdicts = fleet_verdicts(fleet)
    assert [verdict.rival for verdict in verdicts] == ["alone", "common"]
    assert verdicts[0].words().startswith("against the best ordinary model alone (scikit-learn): ")
    assert (effect_of(verdicts, "d0"), effect_of(verdicts, "hurt")) == ("helped", "harmed")


def test_devices_that_compared_nothing_are_left_out():
    assert fleet_verdicts({}) == [] and fleet_verdicts({"old": {"test_samples": 9, "better_than_local": 5}}) == []
    [verdict] = fleet_verdicts({"old": {}, "new": report(3, 1)})
    assert list(verdict.effects) == ["new"] and verdict.interval is None


def test_gains_that_do_not_differ_say_nothing_of_other_devices():
    [verdict] = fleet_verdicts({"a": report(1, 1), "b": report(3, 3)})
    assert verdict.interval is None and "for devices like these" not in verdict.words()


def test_a_difference_of_one_sample_is_never_called():
    [verdict] = fleet_verdicts({f"d{i}": report(1, 0) for i in range(200)})
    assert verdict.gain > 0 and verdict.helped == 0


def test_measured_gains_below_six_groups_are_never_called():
    names = KEPT_RIVALS["local"]
    measured = {names.gain: 0.4, names.error: 0.02}
    few, enough = (report(20, 0, **measured, test_groups=groups) for groups in (5, 6))
    [verdict] = fleet_verdicts({"few": few, **{f"d{i}": enough for i in range(4)}})
    assert verdict.effects["few"] is None and verdict.effects["d0"] == "helped"
    assert verdict.report()["helped"] == 4 and verdict.report()["devices"] == 5


# --- evidence for each device against a direct integration in float64 by scipy, and on fleets that were worked out by hand

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


# --- orders that follow each other in one step are opened together; other effects stay as they are


def test_orders_for_the_same_work_and_round_are_opened_as_one() -> None:
    effects = [Open("train", 3, ("a",)), Open("train", 3, ("b", "c")), Open("evaluate", 3, ("d",)), Open("evaluate", 4, ("e",))]
    assert together(effects) == [Open("train", 3, ("a", "b", "c")), *effects[2:]]


def test_what_happens_between_two_orders_keeps_its_place() -> None:
    effects: list[Effect] = [Open("train", 3, ("a",)), PassOver(("z",)), Open("train", 3, ("b",)), Aggregate(3, ("a",))]
    assert together(effects) == effects
    assert together([]) == []
