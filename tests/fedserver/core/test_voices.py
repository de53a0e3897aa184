"""Votes: on the form of the data before round 1, where a token is one voice, and by scores, where no device decides alone."""

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attune.common.errors import SettingError
from attune.common.plan import Profile
from attune.fedserver.core.ballot import united_classes
from attune.fedserver.core.data_form import agree, one_token, too_many_classes, too_many_tokens
from attune.fedserver.core.voices import MOST_VOTE, bounded

USUAL = Profile(kind="tabular", shape=(3,), labels=[0, 1, 2], samples=20, test_samples=5)
OTHER = msgspec.structs.replace(USUAL, shape=(7,))
HONEST = dict.fromkeys(("ada", "bob", "carl"), USUAL)
FAKE = {f"fake{number}": OTHER for number in range(8)}
OWN = {"ada": "1", "bob": "2", "carl": "3"}


def many(count: int, start: int = 0) -> Profile:
    return msgspec.structs.replace(USUAL, labels=list(range(start, start + count)))


def test_any_number_of_names_of_one_token_are_one_voice() -> None:
    agreement = agree({**HONEST, **FAKE}, OWN | dict.fromkeys(FAKE, "stolen"))
    assert set(agreement.agreed) == set(HONEST)
    assert set(agreement.odd) == set(FAKE)


def test_columns_are_voted_on_by_tokens_too() -> None:
    named = {name: msgspec.structs.replace(USUAL, column_names=["a", "b", "c"]) for name in HONEST}
    fake = {name: msgspec.structs.replace(USUAL, column_names=["x", "y", "z"]) for name in FAKE}
    assert set(agree({**named, **fake}, OWN | dict.fromkeys(fake, "stolen")).agreed) == set(HONEST)


def test_a_fleet_of_one_token_votes_device_by_device() -> None:
    fleet = {**HONEST, "eve": OTHER}
    assert set(agree(fleet, dict.fromkeys(fleet, "shared")).agreed) == set(HONEST)
    assert set(agree(fleet).agreed) == set(HONEST)


def test_a_fleet_of_one_token_is_named() -> None:
    assert "all 3 devices joined with one token" in one_token(dict.fromkeys(HONEST, "shared"))
    for tokens in (OWN, dict.fromkeys(HONEST, ""), {"ada": "1", "bob": "1"}, dict.fromkeys(HONEST, "1") | {"dora": "2"}):
        assert one_token(tokens) == ""


def test_one_token_against_one_is_a_tie_however_many_names_each_has() -> None:
    tie = agree({**HONEST, **FAKE}, dict.fromkeys(HONEST, "a") | dict.fromkeys(FAKE, "b")).tie
    assert "one token have one vote" in tie and "data.shape" in tie


@pytest.mark.parametrize("count", [101, 1000, 60_000])
def test_a_device_that_declares_many_times_the_usual_number_is_refused_by_name(count: int) -> None:
    refused = too_many_classes({**HONEST, "eve": many(count)}, {})
    words = [msgspec.structs.replace(USUAL, kind="tokens", vocabulary=number) for number in (0, 9, 10, count)]
    tokens = too_many_tokens(dict(zip((*HONEST, "eve"), words, strict=True)), {})
    assert set(refused) == set(tokens) == {"eve"} and "data.vocabulary" in str(tokens["eve"])
    assert f"eve declares {count} classes" in str(refused["eve"]) and "data.classes" in str(refused["eve"])


def test_names_of_one_token_do_not_move_the_usual_number_of_classes() -> None:
    fake = {f"fake{number}": many(60_000) for number in range(8)}
    assert set(too_many_classes({**HONEST, **fake}, OWN | dict.fromkeys(fake, "stolen"))) == set(fake)


def test_up_to_a_hundred_classes_and_ten_times_the_usual_number_are_honest() -> None:
    assert too_many_classes({**HONEST, "eve": many(100)}, {}) == {}
    assert too_many_classes({name: many(50) for name in "abc"} | {"d": many(500)}, {}) == {}


def test_all_classes_together_have_a_limit_too() -> None:
    fleet = {f"d{number}": many(9_000, 9_000 * number) for number in range(8)}
    assert too_many_classes(fleet, {}) == {}
    with pytest.raises(SettingError, match=r"72000 classes together.*data\.classes"):
        united_classes(fleet, [])


def test_bounded_scores_by_hand() -> None:
    """The spreads are 2, 0, 4, 6 and 100. The lower median of those above 0 is 4: above 20 they shrink to 20 = 0.2 * 100.

    The middles are -2, -3, -4, -5 and -350. Their median is 4: beyond -20 they become -20.
    """
    scores = {
        "a": {"ada": -1.0, "bob": -3.0, "carl": -2.0, "dan": -8.0, "eve": -400.0},
        "b": {"ada": -3.0, "bob": -3.0, "carl": -6.0, "dan": -2.0, "eve": -300.0},
    }
    found = bounded(scores)
    assert [of.pop("eve") for of in found.values()] == pytest.approx([-30.0, -10.0])
    assert found == {name: {device: score for device, score in of.items() if device != "eve"} for name, of in scores.items()}


def test_two_devices_are_not_bounded_because_neither_is_unusual() -> None:
    scores = {"a": {"ada": -1.0, "eve": -400.0}, "b": {"ada": -3.0, "eve": 0.0}}
    assert bounded(scores) == scores


def test_a_device_with_huge_equal_scores_hides_no_others() -> None:
    honest = {"a": {"ada": -1.0, "bob": -2.0, "carl": -4.0}, "b": {"ada": -2.0, "bob": -3.0, "carl": -7.0}}
    found = bounded({name: {**of, "eve": 1e100} for name, of in honest.items()})
    assert math.fsum(found["a"].values()) - math.fsum(found["b"].values()) == pytest.approx(5.0)


OPTIONS = ("a", "b", "c")
SCORE = st.floats(-1e100, 1e100)


@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 3), min_size=4, max_size=9), st.tuples(SCORE, SCORE, SCORE))
def test_no_device_moves_a_difference_further_than_some_usual_ones(
    honest: list[tuple[float, ...]], lie: tuple[float, ...]
) -> None:
    spreads = sorted(max(of) - min(of) for of in honest)
    assume(spreads[0] > 1e-3)
    scores = {option: {str(d): of[at] for d, of in enumerate(honest)} for at, option in enumerate(OPTIONS)}
    found = bounded({option: of | {"eve": lie[at]} for at, (option, of) in enumerate(scores.items())})
    voted = [found[option]["eve"] for option in OPTIONS]
    assert max(voted) - min(voted) <= MOST_VOTE * spreads[len(spreads) // 2] * (1 + 1e-9)
    assert all(abs(vote) < 1e5 for vote in voted)


@given(st.lists(st.floats(1.0, 4.9), min_size=1, max_size=9), st.floats(0, 3))
def test_devices_of_usual_size_count_in_full(gains: list[float], start: float) -> None:
    scores = {"a": {str(d): start for d in range(len(gains))}, "b": {str(d): start + gain for d, gain in enumerate(gains)}}
    assert bounded(scores) == scores
