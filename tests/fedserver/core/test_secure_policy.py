"""Devices that are silent in exchanges of secure aggregation: what they cost a fleet, an hour in a moment."""

from collections.abc import Collection, Sequence
from itertools import cycle

import msgspec
import pytest

from attune.common.config import PrivacySettings, RoundSettings, load_settings
from attune.common.errors import SettingError
from attune.common.exchange.messages import FixedSurvivors
from attune.fedserver.core.messages import Attempted, Exchanged, Phase, Record
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.planning import reconcile, resolve
from attune.fedserver.core.policy import Synchronous
from attune.fedserver.core.round import step
from attune.fedserver.core.secure_policy import ExchangeWait, SameCohortRounds
from attune.fedserver.core.state import Round

EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")
SURVEY = tuple(f"statistics {name}" for name in EXCHANGES)
NAMES = frozenset(f"d{number}" for number in range(10))
HOUR_S, TRAINS_S, ANSWERS_S, LEAST = 3600.0, 4.0, 0.1, 6


class Fleet:
    """Ten devices that train for four seconds, then answer each exchange in a tenth of one; some are silent in some of them.

    After each round their statistics are summed. Those silent take `turns` rounds for their exchanges.
    """

    def __init__(
        self, silent: Collection[str], exchanges: Sequence[str], names: frozenset[str] = NAMES, turns: int = 1, **said: object
    ) -> None:
        self.settings = msgspec.convert({"rounds": 10**6, "min_clients": 5} | said, RoundSettings)
        self.rules = Rules(self.settings, Synchronous(self.settings, 0, secure=True))
        self.state, self.now, self.silent = Round(connected=names), 0.0, frozenset(silent)
        self.exchanges = cycle([exchanges[turn::turns] for turn in range(turns)])

    @property
    def cohort(self) -> frozenset[str]:
        return frozenset(self.rules.policy.ask(msgspec.structs.replace(self.state, now=self.now)).cohort)

    def sum(self) -> float:
        """Carry a round out, and return for how long it waited for silent devices."""
        self.now += TRAINS_S
        lost_s, asked, chosen = 0.0, self.cohort, next(self.exchanges)
        for exchange in (*EXCHANGES, *SURVEY):
            pending = asked & self.silent if exchange in chosen else frozenset()
            took = dict.fromkeys(asked - pending, ANSWERS_S)
            wait = ExchangeWait(exchange, asked, pending, took, LEAST, PrivacySettings().secure_wait_s)
            waited_s = max(ANSWERS_S, wait.patience_s(self.settings, self.state, self.now))
            self.now += waited_s
            costs = wait.costs(self.settings, self.state, waited_s, self.now)
            self.state = step(self.rules, self.state, Exchanged(self.now, exchange, took, costs)).state
            lost_s += waited_s - ANSWERS_S
            asked = asked if exchange.endswith(("survivors", "unmasking")) else asked - pending
        return lost_s

    def lost_s(self, seconds: float) -> float:
        lost_s = 0.0
        while self.now < seconds:
            lost_s += self.sum()
        return lost_s


@pytest.mark.parametrize("exchanges", [*((name,) for name in EXCHANGES + SURVEY), EXCHANGES[3:], EXCHANGES, SURVEY])
@pytest.mark.parametrize(("turns", "grace_s"), [(1, 300.0), (5, 30.0)])
def test_one_silent_device_of_ten_costs_a_twentieth_of_an_hour_at_most(
    exchanges: tuple[str, ...], turns: int, grace_s: float
) -> None:
    assert 0 < Fleet(["d0"], exchanges, turns=turns, grace_s=grace_s).lost_s(HOUR_S) <= HOUR_S / 20


def test_a_device_in_debt_is_in_no_cohort_until_it_has_paid() -> None:
    fleet = Fleet(["d0"], ["keys"])
    assert fleet.sum() == pytest.approx(60.0 - ANSWERS_S), "in the first rounds it may still build its model"
    assert fleet.cohort == NAMES - {"d0"}
    fleet.now += 20 * 60.0
    assert fleet.cohort == NAMES


def test_a_fleet_that_has_a_pace_waits_a_fifth_of_the_grace() -> None:
    fleet = Fleet([], EXCHANGES)
    assert fleet.lost_s(30.0) == 0
    fleet.silent = frozenset({"d0"})
    assert fleet.sum() == pytest.approx(6.0 - ANSWERS_S)


def test_where_no_sum_can_be_made_without_the_devices_in_debt_they_are_waited_for() -> None:
    few = frozenset(sorted(NAMES)[:5])
    fleet = Fleet(["d0"], ["survivors"], few)
    first = fleet.sum()
    assert fleet.cohort == few
    wait = ExchangeWait("keys", few, frozenset({"d0"}), dict.fromkeys(few - {"d0"}, 0.1), 5, 60.0)
    assert first > 0 and wait.patience_s(fleet.settings, fleet.state, fleet.now) > 0
    assert wait.costs(fleet.settings, fleet.state, 6.0, fleet.now) == {"d0": pytest.approx(5.9)}


def test_a_second_device_in_debt_is_waited_for_only_until_there_can_be_a_sum() -> None:
    fleet = Fleet([], [], frozenset(sorted(NAMES)[:6]))
    owed = dict.fromkeys(("d0", "d1"), 10.0)
    state = step(fleet.rules, fleet.state, Exchanged(0.0, "keys", {}, owed)).state
    took = dict.fromkeys(("d2", "d3", "d4", "d5"), 0.1)
    for pending, patience_s in (({"d0", "d1"}, 60.0), ({"d0"}, 0.0)):
        here = took | dict.fromkeys({"d0", "d1"} - pending, 0.1)
        wait = ExchangeWait("masked", fleet.cohort | {"d0", "d1"}, frozenset(pending), here, 5, 60.0)
        assert wait.patience_s(fleet.settings, state, 1.0) == patience_s


def test_a_fleet_that_is_silent_as_a_whole_is_waited_for_and_not_charged() -> None:
    fleet = Fleet(sorted(NAMES)[:6], ["keys"])
    wait = ExchangeWait("keys", NAMES, fleet.silent, dict.fromkeys(NAMES - fleet.silent, 0.1), LEAST, 60.0)
    assert wait.patience_s(fleet.settings, fleet.state, 0.0) == 60.0
    assert wait.costs(fleet.settings, fleet.state, 60.0, 60.0) == {}


@pytest.mark.parametrize("takes_s", [5.0, 7.0])
def test_a_device_that_is_much_slower_in_each_exchange_has_a_debt_too(takes_s: float) -> None:
    fleet = Fleet([], EXCHANGES)
    fleet.lost_s(30.0)
    wait = ExchangeWait("keys", NAMES, frozenset(), {**dict.fromkeys(NAMES, 0.1), "d0": takes_s}, LEAST, 60.0)
    late = {"d0": pytest.approx(6.9)} if takes_s > 6 else {}
    assert wait.costs(fleet.settings, fleet.state, takes_s, fleet.now) == late


def test_where_it_is_switched_off_each_exchange_waits_for_its_whole_time() -> None:
    assert Fleet(["d0"], ["keys", "masked"], deadline_multiple=0).sum() == pytest.approx(60.0 - ANSWERS_S)


# --- rounds that are all over one cohort (privacy.same_cohort): who is asked, and when no round opens

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
