"""Pooled differences over sites: the equation of Paule and Mandel, sites that agree, few sites, and hostile claims."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from attune.common.statistics import Z
from attune.fedserver.core.fleet_verdict import LEAST_ERROR, pooled

claims = st.tuples(st.floats(-1, 1), st.floats(0, 1e100))


def test_sites_that_agree_are_weighed_by_precision_alone() -> None:
    """Variances 0.01 and 0.04 twice, the first drawn to 0.02: (50 * 0.1 + 25 * 0.1 + 25 * 0.13) / 100 = 0.1075."""
    over = pooled([(0.1, 0.1), (0.1, 0.2), (0.13, 0.2)])
    assert over is not None and over.between == 0 and over.gain == pytest.approx(0.1075) and over.prediction is None
    q = (75 * 0.0075**2 + 25 * 0.0225**2) / 2
    assert stats.t.ppf(0.975, 2) * math.sqrt(q / 100) < (half := Z * math.sqrt(1 / 100)), "they agree by chance"
    assert over.interval == pytest.approx((0.1075 - half, 0.1075 + half), rel=1e-5)


@given(
    st.lists(st.tuples(st.floats(-0.4, 0.4), st.floats(0.002, 0.2)), min_size=1, max_size=12, unique_by=lambda claim: claim[0])
)
def test_spread_and_intervals_are_those_of_an_independent_solution(sites: list[tuple[float, float]]) -> None:
    variances = [error * math.sqrt(median(error**2 for _, error in sites)) for _, error in sites]

    def mean_at(between: float) -> tuple[float, float, float]:
        weight = [1 / (variance + between) for variance in variances]
        mean = sum(w * gain for w, (gain, _) in zip(weight, sites, strict=True)) / sum(weight)
        return mean, sum(weight), sum(w * (gain - mean) ** 2 for w, (gain, _) in zip(weight, sites, strict=True))

    over, freedom = pooled(sites), len(sites) - 1
    assert over is not None and (over.interval is None, over.prediction is None) == (len(sites) < 3, len(sites) < 5)
    if not over.interval:
        return
    between = 0.0 if mean_at(0)[2] <= freedom else optimize.brentq(lambda t: mean_at(t)[2] - freedom, 0, 9, xtol=1e-15)
    assert over.between == pytest.approx(between, rel=1e-4, abs=1e-9)
    mean, total, q = mean_at(between)
    error = max(math.sqrt(q / freedom / total), Z / stats.t.ppf(0.975, freedom) / math.sqrt(mean_at(0)[1]))
    assert over.gain == pytest.approx(mean, abs=1e-6)
    assert over.interval[1] - over.gain == pytest.approx(stats.t.ppf(0.975, freedom) * error, rel=1e-3, abs=1e-9)
    wider = stats.t.ppf(0.975, freedom - 1) * math.hypot(error, math.sqrt(between))
    assert not over.prediction or over.gain - over.prediction[0] == pytest.approx(wider, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("gains", [(0.02, 0.02001, 0.02002), (0.02, 0.02, 0.02)])
def test_three_nearly_equal_gains_are_no_certainty(gains: tuple[float, ...]) -> None:
    """Three sites with errors of 0.05 cannot tell 0.02 from 0, however alike their gains are: 1.96 * 0.05 / sqrt(3) = 0.057."""
    over = pooled([(gain, 0.05) for gain in gains])
    assert over is not None and over.interval == pytest.approx((0.02 - 0.0566, 0.02 + 0.0566), abs=1e-4)
    assert "at least as wide as if all sites had one gain" in over.words()


@given(st.lists(claims, min_size=3, max_size=8))
def test_any_claim_gives_finite_numbers(sites: list[tuple[float, float]]) -> None:
    over = pooled(sites)
    assert over is not None and abs(over.gain) <= 1 + 1e-9
    assert all(math.isfinite(end) for ends in (over.interval, over.prediction) if ends for end in ends)
    assert "nan" not in over.words() and "inf" not in over.words()


def test_one_site_that_claims_no_error_does_not_decide() -> None:
    honest = [(0.01, 0.02), (0.02, 0.02), (0.0, 0.02), (0.015, 0.02)]
    lying = pooled([*honest, (1.0, 0.0)])
    assert lying is not None and lying.gain < 0.25 and lying.interval is not None and lying.interval[0] < 0 < LEAST_ERROR
