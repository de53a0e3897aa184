"""Early end of a federation: what counts as a gain, by hand and for any liar, and which settings allow it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import SettingError
from attune.fedserver.choosing.candidates import check_race, common_settings
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.training_length import improves


def test_the_sum_over_devices_decides() -> None:
    best = {"a": -3.0, "b": -2.0, "c": -1.0}
    assert improves({"a": -2.0, "b": -2.5, "c": -1.0}, best)  # by 1 - 0.5
    assert not improves({"a": -3.5, "b": -1.5, "c": -1.0}, best)  # the sums are equal
    assert not improves({"a": -3.0, "b": -2.0, "c": -1.25}, best)


def test_devices_that_scored_one_round_alone_do_not_count() -> None:
    best = {"a": -3.0, "b": -2.0, "c": -1.0}
    assert not improves({"a": -3.5, "b": -2.0, "d": -0.1}, best)
    assert improves({"a": -9.0, "d": -9.0, "e": -9.0}, best), "most devices are others: it begins anew"


@given(st.sampled_from([-1e100, -1e6, 1e6, 1e100]), st.booleans())
def test_one_liar_of_nine_decides_nothing(lie: float, at_best: bool) -> None:
    """Eight devices gain or lose 1; the liar's vote is bounded to 5 of them."""
    for gain in (1.0, -1.0):
        best = {f"d{n}": -5.0 for n in range(8)} | {"liar": lie if at_best else -5.0}
        now = {f"d{n}": -5.0 + gain for n in range(8)} | {"liar": -5.0 if at_best else lie}
        assert improves(now, best) is (gain > 0)


def test_auto_stands_for_a_maximum_and_a_patience() -> None:
    settings = resolve({"round": {"rounds": "auto"}})
    assert (settings.round.rounds, settings.round.patience) == (200, 10)
    assert settings.train.scored_rounds == tuple(range(5, 201, 5))
    assert resolve({"round": {"rounds": "auto", "patience": 20}}).round.patience == 20
    assert resolve({"round": {"rounds": 12, "patience": 5}}).train.scored_rounds == (5, 10)
    assert resolve({"round": {"rounds": 12}}).train.scored_rounds == ()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"privacy": {"unit": "example", "noise": 1.0}}, "privacy.unit"),
        ({"privacy": {"unit": "client", "noise": 1.0, "devices": 9}}, "privacy.unit"),
        ({"train": {"validation": 0.0}}, "train.validation"),
        ({"method": {"name": "fedmcsa", "preset": "published"}}, "train.validation"),
    ],
)
def test_settings_that_allow_no_early_end(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        resolve({"round": {"rounds": "auto"}, **more})


def test_buffered_rounds_do_not_end_early() -> None:
    with pytest.raises(SettingError, match="synchronous"):
        resolve({"method": {"name": "fedavg"}, "round": {"rounds": "auto", "mode": "buffered"}})


def test_all_candidates_of_a_race_train_to_the_maximum() -> None:
    given = {"method": {"name": "auto"}, "round": {"rounds": "auto"}}
    common = common_settings(given, check_race(given))
    settings = resolve({**common, "method": {"name": "fedavg"}})
    assert (settings.round.rounds, settings.round.patience, settings.train.scored_rounds) == (200, 0, (30, 60, 200))
