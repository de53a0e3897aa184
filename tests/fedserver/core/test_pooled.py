"""Pooled differences over sites: the equation of Paule and Mandel, sites that agree, few sites, and hostile claims."""

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from attune.common.statistics import interval_of_mean
from attune.fedserver.core.fleet_verdict import LEAST_ERROR, pooled

claims = st.tuples(st.floats(-1, 1), st.floats(0, 1e100))


def test_sites_that_agree_are_weighed_by_precision_alone() -> None:
    """Variances 0.01 and 0.04 twice, the first drawn to 0.02: (50 * 0.1 + 25 * 0.1 + 25 * 0.13) / 100 = 0.1075."""
    over = pooled([(0.1, 0.1), (0.1, 0.2), (0.13, 0.2)])
    assert over is not None and over.between == 0 and over.gain == pytest.approx(0.1075) and over.prediction is None
    robust = 0.25 * 0.0075**2 / 0.5 + 0.0625 * (0.0075**2 + 0.0225**2) / 0.75
    half = math.sqrt(0.25 * 0.01 + 0.0625 * 0.04 * 2)  # one standard error
    assert stats.t.ppf(0.975, 2) * math.sqrt(robust) < half, "they agree by chance"
    assert over.interval == pytest.approx((0.1075 - half, 0.1075 + half), rel=1e-5)


def test_of_equal_weights_the_interval_is_students() -> None:
    gains = [0.1, 0.3, -0.2, 0.05]
    over = pooled([(gain, 0.04) for gain in gains])
    assert over is not None and over.interval == pytest.approx(interval_of_mean(gains))
    assert over.between == pytest.approx(np.var(gains, ddof=1) - 0.04**2)


@given(
    st.lists(st.tuples(st.floats(-0.4, 0.4), st.floats(0.002, 0.2)), min_size=1, max_size=12, unique_by=lambda claim: claim[0])
)
def test_spread_and_intervals_are_those_of_an_independent_solution(sites: list[tuple[float, float]]) -> None:
    """The interval is that of a weighted regression on a constant by HC2 (MacKinnon and White, J. of Econometrics 1985)."""
    gain_K, error_K = np.array(sites).T
    freedom = len(sites) - 1

    def spread_at(between: float) -> float:
        weight_K = 1 / (error_K**2 + between)
        return float(weight_K @ (gain_K - np.average(gain_K, weights=weight_K)) ** 2) - freedom

    over = pooled(sites)
    assert over is not None and (over.interval is None, over.prediction is None) == (len(sites) < 3, len(sites) < 5)
    if not over.interval:
        return
    between = 0.0 if spread_at(0) <= 0 else optimize.brentq(spread_at, 0, 9, xtol=1e-15)
    assert over.between == pytest.approx(between, rel=1e-4, abs=1e-9)
    x_K1 = 1 / np.sqrt(error_K * math.sqrt(median(error_K**2)) + between)[:, None]
    solved_1K = np.linalg.pinv(x_K1)
    left_K = gain_K * x_K1[:, 0] - (x_K1 @ solved_1K) @ (gain_K * x_K1[:, 0])
    robust = float(solved_1K[0] ** 2 @ (left_K**2 / (1 - np.diag(x_K1 @ solved_1K))))
    sampling = float((solved_1K[0] * x_K1[:, 0]) ** 2 @ error_K**2)
    half = max(stats.t.ppf(0.975, freedom) * math.sqrt(robust), math.sqrt(sampling))
    assert over.gain == pytest.approx(float(solved_1K[0] @ (gain_K * x_K1[:, 0])), abs=1e-6)
    assert over.interval[1] - over.gain == pytest.approx(half, rel=1e-3, abs=1e-9)
    wider = stats.t.ppf(0.975, freedom - 1) * math.hypot(half / stats.t.ppf(0.975, freedom), math.sqrt(between))
    assert not over.prediction or over.gain - over.prediction[0] == pytest.approx(wider, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("gains", [(0.02, 0.02001, 0.02002), (0.02, 0.02, 0.02)])
def test_three_nearly_equal_gains_are_no_certainty(gains: tuple[float, ...]) -> None:
    """Three sites with errors of 0.05 cannot tell 0.02 from 0, however alike their gains are: 0.05 / sqrt(3) = 0.0289."""
    over = pooled([(gain, 0.05) for gain in gains])
    assert over is not None and over.interval == pytest.approx((0.02 - 0.0289, 0.02 + 0.0289), abs=1e-4)


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
