"""The race of candidate methods: rungs, paired differences and decisions, by hand and for any scores."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.fedserver.choosing.racing import (
    ALONE,
    CLOSED_FORM,
    FEWEST_ROUNDS,
    at_end,
    at_rung,
    gained_by_samples,
    paired,
    rungs_of,
)

NUMBERS = st.floats(-1e6, 1e6)
NAMES = ("fedavg", "fedper", "fedtp", "fedmcsa")


@st.composite
def any_scores(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> dict[str, dict[str, float]]:
    devices = draw(st.integers(1, 6))
    return {name: {str(device): draw(NUMBERS) for device in range(devices)} for name in names}


@pytest.mark.parametrize(
    ("rounds", "rungs"), [(3, (1, 2)), (4, (1, 2)), (10, (2, 3)), (20, (3, 6)), (30, (5, 9)), (100, (15, 30))]
)
def test_rungs_lie_at_15_and_30_percent_rounded_up(rounds: int, rungs: tuple[int, int]) -> None:
    assert rungs_of(rounds) == rungs


@given(st.integers(FEWEST_ROUNDS, 5000))
def test_rungs_are_two_and_before_the_end(rounds: int) -> None:
    first, second = rungs_of(rounds)
    assert 1 <= first < second < rounds


def test_a_paired_difference_by_hand() -> None:
    """Gains 1, 2 and 6: their sum is 9, their variance (4 + 1 + 9) / 2 = 7, and the error of the sum is sqrt(3 * 7)."""
    scores = {"fedper": {"a": -1.0, "b": -2.0, "c": -3.0}, "fedavg": {"a": -2.0, "b": -4.0, "c": -9.0, "d": 0.0}}
    difference = paired("fedper", "fedavg", scores)
    assert (difference.nats, difference.devices) == (9.0, 3)
    assert difference.error == pytest.approx(math.sqrt(21))
    assert difference.exceeds(1.0) and not difference.exceeds(2.0)


def test_two_go_on_at_the_first_rung_however_far_apart_they_are() -> None:
    scores = {"a": {"x": -9.0, "y": -9.1}, "b": {"x": -5.0, "y": -5.0}, "c": {"x": -1.0, "y": -1.0}}
    assert at_rung(0, scores).kept == ("c", "b")
    assert at_rung(1, scores).kept == ("c",)
    assert at_rung(1, scores).totals == {"c": -2.0, "b": -10.0, "a": -18.1}


def test_the_first_rung_gives_up_only_who_is_clearly_behind() -> None:
    """Gains of b over d are 3 and 0, the sum 3 and the error 3. Over e 3 and 1, 4 and 2. Over f 3 and 2, 5 and 1."""
    nats = {"f": (-3.0, -2.0), "e": (-3.0, -1.0), "d": (-3.0, 0.0), "b": (0.0, 0.0), "a": (9.0, 9.0)}
    scores = {name: dict(zip("xy", of, strict=True)) for name, of in nats.items()}
    assert at_rung(0, scores).kept == ("a", "b", "d", "e")
    assert at_rung(1, scores).kept == ("a",), "at the second rung two at most go on"


def test_at_the_second_rung_both_go_on_within_one_standard_error() -> None:
    """Gains 3 and -1: the sum is 2, the variance 8, the error sqrt(2 * 8) = 4. Gains 3 and 1: sum 4, error 2."""
    assert at_rung(1, {"a": {"x": 3.0, "y": -1.0}, "b": {"x": 0.0, "y": 0.0}}).kept == ("a", "b")
    assert at_rung(1, {"a": {"x": 3.0, "y": 1.0}, "b": {"x": 0.0, "y": 0.0}}).kept == ("a",)
    assert at_rung(1, {"a": {"x": 1.0, "y": 0.0}, "b": {"x": 0.0, "y": 0.0}}).kept == ("a", "b"), "the error is 1, not below 1"
    assert at_rung(1, {"a": {"x": 0.0}, "b": {"x": -1e6}}).kept == ("a", "b"), "one device makes nothing clear"


def test_training_alone_wins_unless_a_candidate_is_surely_ahead() -> None:
    """Gains of 1, 2 and 3 nats: t = 3.46 with two degrees of freedom, p = 0.037 (1 / 2 - t / (2 sqrt(t t + 2)))."""
    alone, ahead = {"x": 0.0, "y": 0.0, "z": 0.0}, {"x": 1.0, "y": 2.0, "z": 3.0}
    assert at_end({"fedavg": alone, ALONE: alone}).kept == (ALONE,)
    decision = at_end({ALONE: alone, "fedavg": ahead})
    assert decision.difference is not None and decision.kept == ("fedavg",)
    assert decision.difference.p == pytest.approx(0.5 - 12**0.5 / (2 * 14**0.5)) and decision.level == 0.05
    assert at_end({ALONE: alone, "fedavg": ahead}, entered=2).kept == (ALONE,), "one of two may be ahead by chance"
    assert at_end({ALONE: alone, "fedavg": dict.fromkeys("xyz", 0.5)}, entered=9).kept == ("fedavg",), "by the same on all"
    assert at_end({ALONE: {"x": -9.0}, "fedavg": {"x": -0.5}}).kept == (ALONE,), "one device shows nothing"
    assert at_end({ALONE: {"x": -1.0}}).kept == (ALONE,)


def test_all_training_samples_show_what_few_held_out_ones_do_not() -> None:
    """Gains 0.9, 0.7 and 0.8 with errors 0.6, 0.6 and 0.7: 2.4 nats with an error of 1.1, and 1 - Phi(24 / 11) = 0.01457."""
    few = {ALONE: {"x": 0.0, "y": 0.0}, "fedavg": {"x": 5.0, "y": -4.0}, CLOSED_FORM: {"x": 1.0, "y": -1.0}}
    gains, errors = {"x": 0.9, "y": 0.7, "z": 0.8}, {"x": 0.6, "y": 0.6, "z": 0.7}
    gained = gained_by_samples(gains, errors)
    assert gained is not None and (gained.nats, gained.error) == pytest.approx((2.4, 1.1))
    assert gained.p == pytest.approx(0.01457, abs=1e-5)
    assert at_end(few, entered=2).kept == (ALONE,)
    decision = at_end(few, entered=2, gained=gained)
    assert decision.kept == (CLOSED_FORM,) and decision.difference == gained and decision.level == 0.025
    unsure = gained_by_samples(gains, {name: 1.2 * nats for name, nats in errors.items()})  # p = 0.0345
    assert at_end(few, entered=2, gained=unsure).kept == (ALONE,)
    clear = {**few, "fedavg": {"x": 5.0, "y": 5.0}}
    decision = at_end(clear, entered=2, gained=gained)
    assert decision.kept == ("fedavg",) and decision.level == 0.0125, "what held-out samples show comes first"
    assert gained_by_samples({"older": 9.0}, {}) is None, "it reports no error, and has no vote"


@given(st.floats(-1e100, 1e100), st.floats(-1e100, 1e100))
def test_by_samples_no_device_counts_for_more_than_five(gain: float, error: float) -> None:
    """Check by hand: the others gain 9 nats with an error of 3; their usual gain is 1, so a false device adds 5 at most."""
    gained = gained_by_samples(
        dict.fromkeys("abcdefghi", 1.0) | {"eve": gain}, dict.fromkeys("abcdefghi", 1.0) | {"eve": error}
    )
    assert gained is not None and gained.error is not None
    assert 4.0 <= gained.nats <= 14.0 and 3.0 <= gained.error <= 34**0.5


@pytest.mark.parametrize(("entered", "devices", "harm"), [(1, 10, 0.0), (4, 4, 0.0), (1, 4, 0.3), (4, 10, 0.3)])
def test_where_nothing_helps_a_federation_is_rarely_chosen(entered: int, devices: int, harm: float) -> None:
    """In 2,000 races at most 5 % end with a candidate (and not hardly any); the error of a share is 0.5 %.

    A device has 40 training samples and 5 held-out ones. All candidates help half of the devices by `harm` deviations a sample
    and harm the others as much.
    """
    draws, chosen, effect = np.random.default_rng(0), 0, np.tile([harm, -harm], devices // 2)
    zeros = dict.fromkeys(range(devices), 0.0)
    for _ in range(2000):
        held_out = draws.normal(5 * effect, math.sqrt(5), (entered, devices))
        each = draws.normal(effect[:, None], 1.0, (devices, 40))
        gained = gained_by_samples(dict(enumerate(each.sum(1))), dict(enumerate(math.sqrt(40) * each.std(1, ddof=1))))
        scores = {f"c{place}": dict(enumerate(of)) for place, of in enumerate(held_out)}
        chosen += at_end({ALONE: zeros, **scores}, entered=entered, gained=gained).kept != (ALONE,)
    assert 0.02 < chosen / 2000 < 0.06


def test_candidates_that_are_level_are_told_apart_by_all_comparisons() -> None:
    """The last scores differ by 1 with an error of 3; over all comparisons fedtp is ahead by 2 + 3 - 1 nats."""
    earlier = [
        {"fedtp": {"x": -4.0, "y": -4.0}, "fedper": {"x": -5.0, "y": -5.0}, ALONE: {"x": -5.0, "y": -5.0}},
        {"fedtp": {"x": -2.0, "y": -3.0}, "fedper": {"x": -4.0, "y": -4.0}, ALONE: {"x": -4.0, "y": -4.0}},
    ]
    last = {ALONE: {"x": -50.0, "y": -51.0}, "fedper": {"x": 0.0, "y": -1.0}, "fedtp": {"x": -2.0, "y": 0.0}}
    decision = at_end(last, earlier)
    assert list(decision.totals) == ["fedper", "fedtp", ALONE] and decision.kept == ("fedtp",)
    assert decision.evidence == {"fedtp": -15.0, "fedper": -19.0}
    assert at_end(last).kept == ("fedper",), "without earlier ones, the last comparison decides"


def test_earlier_scores_do_not_show_that_federating_pays() -> None:
    earlier = [{"fedtp": {"x": 90.0, "y": 91.0}, ALONE: {"x": 0.0, "y": 0.0}}]
    decision = at_end({ALONE: {"x": 5.0, "y": 4.0}, "fedtp": {"x": 0.0, "y": 0.0}}, earlier)
    assert decision.kept == (ALONE,) and decision.evidence == {"fedtp": 0.0}


@given(any_scores())
def test_the_best_sum_always_goes_on(scores: dict[str, dict[str, float]]) -> None:
    sums = {name: math.fsum(of.values()) for name, of in scores.items()}
    for rung in (0, 1):
        decision = at_rung(rung, scores)
        assert sums[decision.kept[0]] == max(sums.values()) == next(iter(decision.totals.values()))
        assert 1 <= len(decision.kept) <= (2 if rung else len(NAMES))
    assert len(at_rung(0, scores).kept) >= 2
    assert set(at_rung(1, scores).kept) <= set(at_rung(0, scores).kept)


@given(any_scores(), st.sampled_from(NAMES), NUMBERS)
def test_a_device_that_one_candidate_lacks_counts_for_none(
    scores: dict[str, dict[str, float]], lacking: str, extreme: float
) -> None:
    more = {name: of | ({"late": extreme} if name != lacking else {}) for name, of in scores.items()}
    assert at_rung(0, more).totals == at_rung(0, scores).totals


@given(any_scores((*NAMES, ALONE)), st.floats(-100, 100))
def test_an_equal_shift_of_a_device_changes_no_sum_difference(scores: dict[str, dict[str, float]], shift: float) -> None:
    moved = {name: {device: score + shift for device, score in of.items()} for name, of in scores.items()}
    before, after = at_end(scores), at_end(moved)
    assert before.difference is not None and after.difference is not None
    assert after.difference.nats == pytest.approx(before.difference.nats, abs=1e-6)
