"""Rounds that are all over one cohort (privacy.same_cohort): who is asked, and when no round opens."""

from __future__ import annotations

import msgspec
import pytest

from attune.common.config import RoundSettings, load_settings
from attune.common.errors import SettingError
from attune.common.exchange.messages import FixedSurvivors
from attune.fedserver.core.messages import Attempted, Phase, Record
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.planning import reconcile, resolve
from attune.fedserver.core.round import step
from attune.fedserver.core.secure_policy import SameCohortRounds
from attune.fedserver.core.state import Round

ALL = tuple(f"d{number}" for number in range(8))
COHORT = ALL[:5]
HOME = {"method": {"name": "fedavg"}, "privacy": {"secure_aggregation": True, "same_cohort": True}}


def policy(left_out: tuple[str, ...] = (), **said: int) -> SameCohortRounds:
    settings = msgspec.convert({"rounds": 9, "min_clients": 3, "clients": 5} | said, RoundSettings)
    return SameCohortRounds(msgspec.structs.replace(settings, left_out=left_out), 0, secure=True)


def waiting(connected: tuple[str, ...] = ALL, cohort: tuple[str, ...] = COHORT) -> Round:
    return Round(Record(same_cohort=cohort), connected=frozenset(connected))


def test_the_survivors_of_the_first_sum_are_the_cohort_from_then_on() -> None:
    rounds = policy()
    first = waiting(cohort=())
    drawn = rounds.ask(first).cohort
    assert len(drawn) == 5
    fixed = FixedSurvivors(3, (), drawn, drawn[:4])
    noted = step(Rules(rounds.settings, rounds), first, Attempted(0.0, 1, fixed, fixed.survivors)).state
    assert rounds.ask(noted) == rounds.ask(waiting(cohort=drawn[:4]))
    assert rounds.ask(noted).devices == drawn[:4]
    later = step(Rules(rounds.settings, rounds), noted, Attempted(0.0, 2)).state
    assert later.record.same_cohort == drawn[:4]


def test_without_one_device_of_the_cohort_no_round_opens_and_none_takes_its_place() -> None:
    rounds, state = policy(), waiting(ALL[1:])
    assert not rounds.opens(state)
    assert "d0 of the 5 devices of all sums must be here" in rounds.refuses(state)
    assert rounds.opens(waiting())
    away = Round(
        Record(phase=Phase.TRAINING, devices=COHORT, cohort=COHORT, same_cohort=COHORT),
        connected=frozenset(ALL[1:]), left_at={"d0": 0.0}, deadline=100.0,
    )  # fmt: skip
    assert rounds.replacements(away, 99.0) == ()
    assert rounds.ask_again(away) == frozenset(COHORT[1:]) and not rounds.extends(away, 99.0)


def test_the_operator_goes_on_without_a_majority_of_the_cohort_or_with_all_of_it() -> None:
    few = policy(left_out=ALL[:2])
    assert not few.opens(waiting(ALL[2:]))
    assert "name at least 3 of them, or none" in few.refuses(waiting(ALL[2:]))
    many = policy(left_out=ALL[:3])
    assert many.opens(waiting(ALL[1:]))
    assert many.ask(waiting(ALL[1:])).cohort == ALL[3:]
    assert not many.opens(waiting(ALL[:5])), "two are left"
    assert "leaves 2 devices, and round.min_clients is 3" in many.refuses(waiting(ALL[:5]))


def test_who_is_left_out_may_change_at_a_restart() -> None:
    assert reconcile(HOME, load_settings(None, ['round.left_out=["d0"]'], {}))["round"]["left_out"] == ["d0"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"privacy": {"same_cohort": True}}, "they need privacy.secure_aggregation = true"),
        ({"round": {"left_out": ["a"]}}, "they need privacy.secure_aggregation = true"),
        ({"privacy": {"secure_aggregation": True}, "round": {"left_out": ["a"]}}, "left_out needs privacy.same_cohort"),
        (
            HOME | {"round": {"clients": 8, "over_selection": 0.2}},
            "same_cohort cannot be combined with round.over_selection",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        resolve({"method": {"name": "fedavg"}} | settings)
