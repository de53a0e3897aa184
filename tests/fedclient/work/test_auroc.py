"""AUROC of two models on the same samples: by hand, by scikit-learn, by double sums, and by every swap of the two models."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import t as student_t
from sklearn.metrics import roc_auc_score, roc_curve

from attune.common.metrics import FALSE_RATES
from attune.common.statistics import Z
from attune.fedclient.work.auroc import aurocs, freedom, interval, newcombe, rarer, sensitivities

Floats = npt.NDArray[np.float64]
INTERVAL = {"auroc_low": 0.0, "auroc_high": 1.0}


def shares_of(score_N: Floats) -> Floats:
    return np.stack([1 - score_N, score_N], axis=1)


def measured(
    kept_N: Floats, alone_N: Floats, event_N: npt.NDArray[np.bool_], groups: npt.NDArray[np.intp] | None = None
) -> dict[str, float]:
    return aurocs(shares_of(kept_N), shares_of(alone_N), event_N.astype(int), groups, fewest=1)


def test_placements_counted_by_hand() -> None:
    """Events score 3 and 2, others 1 and 2: of the pairs three are in order and one is a tie, so 3.5 of 4.

    The rival has 4, 1 against 2, 3: two of four. Placements of the events are 1 and 3/4 against 1 and 0, so the differences are
    0 and 3/4; of the others 1 and 3/4 against 1/2 and 1/2, differences 1/2 and 1/4. All means are 3/8. Variances of the means:
    2 (3/8)^2 / 2 = 9/64, and 2 (1/8)^2 / 2 = 1/64 (DeLong), together 10/64.
    """
    event_N = np.array([True, True, False, False])
    both = measured(np.array([3.0, 2, 1, 2]), np.array([4.0, 1, 2, 3]), event_N)
    assert (both["auroc_kept"], both["auroc_alone"], both["auroc_gain_alone"]) == (0.875, 0.5, 0.375)
    wider = 12.7062 / 1.95996  # Student's t of 1 degree
    assert both["auroc_error_alone"] == pytest.approx(math.sqrt(10 / 64) * wider, rel=1e-5)


def psi(event: float, other: float) -> float:
    return float(event > other) + 0.5 * float(event == other)


def direct_error(kept_N: Floats, alone_N: Floats, event_N: npt.NDArray[np.bool_]) -> float:
    """Return DeLong's standard error by its definition: kernels of all pairs, and covariances of their means."""
    kernels = np.array([[[psi(e, o) for o in s[~event_N]] for e in s[event_N]] for s in (kept_N, alone_N)])
    by_event, by_other = np.cov(kernels.mean(axis=2)), np.cov(kernels.mean(axis=1))
    cov = by_event / event_N.sum() + by_other / (~event_N).sum()
    return math.sqrt(max(0.0, cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]))


samples = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), min_size=6, max_size=30).filter(
    lambda rows: min(sum(row[2] for row in rows), sum(not row[2] for row in rows)) >= 2
)


@given(samples)
def test_areas_and_errors_are_those_of_the_definition_with_ties_and_constants(rows: list[tuple[int, int, bool]]) -> None:
    kept_N, alone_N = (np.array(column, dtype=float) for column in list(zip(*rows, strict=True))[:2])
    event_N = np.array([row[2] for row in rows])
    both = measured(kept_N, alone_N, event_N)
    assert both["auroc_kept"] == pytest.approx(roc_auc_score(event_N, kept_N))
    assert both["auroc_alone"] == pytest.approx(roc_auc_score(event_N, alone_N))
    assert both["auroc_gain_alone"] == pytest.approx(both["auroc_kept"] - both["auroc_alone"])
    wider = student_t.ppf(0.975, rarer(event_N) - 1) / Z
    assert both["auroc_error_alone"] == pytest.approx(direct_error(kept_N, alone_N, event_N) * wider, rel=1e-5, abs=1e-9)
    single = measured(kept_N, alone_N, event_N, np.arange(len(rows)))
    assert {**single, **INTERVAL} == {**both, **INTERVAL}, "groups of one sample are no groups"
    assert 0 < both["auroc_p_alone"] <= 1


@settings(max_examples=20)
@given(samples.map(lambda rows: [*rows[:4], (1, 2, True), (1, 3, False)]))
def test_the_p_value_of_few_cases_counts_every_swap_of_the_models(rows: list[tuple[int, int, bool]]) -> None:
    kept_N, alone_N = (np.array(column, dtype=float) for column in list(zip(*rows, strict=True))[:2])
    event_N = np.array([row[2] for row in rows])
    first, second = ([(np.sum(s < x) + np.sum(s <= x)) / 2 for x in s] for s in (kept_N, alone_N))  # ranks
    differences = []
    for swaps in itertools.product((False, True), repeat=len(rows)):
        pairs = [(y, x) if swap else (x, y) for x, y, swap in zip(first, second, swaps, strict=True)]
        areas = [np.mean([psi(e, o) for e in score_N[event_N] for o in score_N[~event_N]]) for score_N in np.array(pairs).T]
        differences.append(abs(areas[0] - areas[1]))
    expected = np.mean(np.array(differences) >= differences[0] - 1e-9)
    assert measured(kept_N, alone_N, event_N)["auroc_p_alone"] == pytest.approx(expected)


def test_sensitivities_by_hand() -> None:
    """Let one of two events score 0.9, above all ten others, and one 0.5, with a fifth of the others below it and none beside.

    The first is called before any other: half of the events at rates up to 0.8, and both from there on.
    """
    score_N = np.array([0.9, 0.5, *[0.8] * 8, *[0.1] * 2])
    event_N = np.arange(12) < 2
    curve = dict(zip(FALSE_RATES, sensitivities(score_N, event_N), strict=True))
    assert curve[0.01] == pytest.approx(0.5, abs=1e-4)
    assert curve[0.7] == pytest.approx(0.5, abs=1e-4) and curve[0.8] == curve[0.9] == 1.0


@given(samples)
def test_sensitivities_lie_on_the_roc_curve_through_the_devices_thresholds(rows: list[tuple[int, int, bool]]) -> None:
    score_N, event_N = np.array([row[0] for row in rows], dtype=float), np.array([row[2] for row in rows])
    false_T, true_T, _ = roc_curve(event_N, score_N, drop_intermediate=False)
    expected = []
    for rate in FALSE_RATES:  # the line between the last threshold at or below the rate and the first one above it
        below, above = np.flatnonzero(false_T <= rate)[-1], np.flatnonzero(false_T > rate)[0]
        share = (rate - false_T[below]) / (false_T[above] - false_T[below])
        expected.append(true_T[below] + share * (true_T[above] - true_T[below]))
    assert sensitivities(score_N, event_N) == pytest.approx(expected, abs=1e-4)


def test_alike_copies_in_a_group_count_once() -> None:
    """Copy each sample thrice: by groups the error is that of the samples, and only without groups is it smaller."""
    draw = np.random.default_rng(0)
    event_N = np.arange(120) < 30
    kept_N, alone_N = draw.normal(size=(2, 120)) + event_N
    once = measured(kept_N, alone_N, event_N)
    copied = (np.repeat(kept_N, 3), np.repeat(alone_N, 3), np.repeat(event_N, 3))
    grouped = measured(*copied, np.repeat(np.arange(120), 3))
    assert {**grouped, **INTERVAL} == pytest.approx({**once, **INTERVAL})
    assert measured(*copied)["auroc_error_alone"] < 0.6 * once["auroc_error_alone"]
    distance = abs(once["auroc_gain_alone"]) / direct_error(kept_N, alone_N, event_N)
    assert once["auroc_p_alone"] == pytest.approx(2 * student_t.sf(distance, 29))


def test_unequal_groups_have_the_degrees_of_freedom_of_satterthwaite() -> None:
    """Let twelve events have groups of 3, 3, 2, 1, 1, 1 and 1: 26^2 / (81 + 81 + 16 + 4) = 3.7 equal ones."""
    event_N, group_N = np.arange(22) < 12, np.repeat(np.arange(17), [3, 3, 2, *[1] * 14])
    assert rarer(event_N, group_N) == 7 and freedom(event_N, group_N) == 4 - 1
    squares = (np.random.default_rng(0).normal(size=(20_000, 7)) ** 2) @ np.array([9, 9, 4, 1, 1, 1, 1])
    assert 2 * squares.mean() ** 2 / squares.var() == pytest.approx(26**2 / 182, rel=0.05), "as a chi-square with so many"
    assert freedom(np.arange(50) < 12) == 11 and freedom(np.arange(90) < 45, np.arange(90) // 3) == 14


@pytest.mark.parametrize(("events", "others"), [(9, 200), (200, 9), (0, 50)])
def test_fewer_than_ten_cases_give_no_number(events: int, others: int) -> None:
    y_N = np.repeat([1, 0], [events, others])
    score_N = np.random.default_rng(1).random(len(y_N))
    assert aurocs(shares_of(score_N), shares_of(score_N), y_N) == {} and rarer(y_N == 1) == min(events, others)
    tens = np.repeat([1, 0], [90, 200])
    assert aurocs(shares_of(score := np.arange(290.0)), shares_of(score), tens, np.arange(290) // 10) == {}, "9 patients"


def test_more_classes_have_the_mean_of_one_against_the_rest_and_no_test() -> None:
    draw = np.random.default_rng(2)
    y_N, kept_NC, alone_NC = draw.integers(0, 3, 90), draw.dirichlet(np.ones(3), 90), draw.dirichlet(np.ones(3), 90)
    kept, alone = (roc_auc_score(y_N, share_NC, multi_class="ovr") for share_NC in (kept_NC, alone_NC))
    assert aurocs(kept_NC, alone_NC, y_N) == pytest.approx({"auroc_kept": kept, "auroc_alone": alone})
    assert aurocs(kept_NC[y_N < 2], alone_NC[y_N < 2], y_N[y_N < 2]) == {}, "one class has no sample"


@given(st.floats(0.02, 0.98), st.integers(10, 80), st.integers(10, 2000))
def test_the_interval_solves_newcombes_equation(area: float, events: int, others: int) -> None:
    def distance(theta: float) -> float:
        improved = (events + others) / 2 - 1
        q1, q2 = theta / (2 - theta), 2 * theta**2 / (1 + theta)  # Hanley and McNeil's
        variance = theta * (1 - theta) + improved * (q1 - theta**2 + q2 - theta**2)
        return (area - theta) ** 2 - Z**2 * variance / (events * others)

    low, high = newcombe(1.0, 10, 200)
    assert 0.7 < low < 0.99 and high == 1.0, "a perfect model"
    low, high = newcombe(area, events, others)
    assert low == pytest.approx(brentq(distance, 1e-12, area), abs=1e-7)
    assert high == pytest.approx(brentq(distance, area, 1 - 1e-12), abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_groups_leaves_each_of_them_out(seed: int) -> None:
    draw, event_N = np.random.default_rng(seed), np.arange(90) < 30
    score_N, group_N = np.round(draw.normal(size=90) + event_N, 1), draw.permutation(np.arange(90) % 12)
    left = np.array([roc_auc_score(event_N[group_N != g], score_N[group_N != g]) for g in range(12)])
    logit_G, area = np.log(left / (1 - left)), roc_auc_score(event_N, score_N)
    half = student_t.ppf(0.975, freedom(event_N, group_N)) * math.sqrt(11 / 12 * np.square(logit_G - logit_G.mean()).sum())
    ends = [1 / (1 + math.exp(-(math.log(area / (1 - area)) + sign * half))) for sign in (-1, 1)]
    assert interval(score_N, event_N, group_N) == pytest.approx(ends, rel=1e-5)
    low, high = interval(event_N.astype(float), event_N, group_N)
    assert 0.7 < low < 0.95 and high == 1, "a perfect model"
