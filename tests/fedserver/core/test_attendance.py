"""Devices that cost the others time, by scripts of honest and hostile ones: events in, effects out, an hour in a moment."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from attune.common.config import RoundSettings
from attune.fedserver.core.messages import (
    Aggregate,
    Aggregated,
    Connected,
    DeviceProgressed,
    Disconnected,
    Event,
    Excused,
    Open,
    Phase,
    Reported,
    Tick,
)
from attune.fedserver.core.policy import Synchronous, passed_over
from attune.fedserver.core.round import Rules, next_wake, step
from attune.fedserver.core.state import LONGEST_S, Round, indebted

HOUR_S = 3600.0
TAKES_S = 4.0
HONEST = ("ada", "bob", "carl")
Hostile = Callable[["Fleet", str, int], None]  # what Eve does with her order of this work and round


class Fleet:
    """Honest devices that need a second for an order, and Eve, who gets each order at once."""

    def __init__(self, eve: Hostile | None, *, after_s: float = 20.0, **said: object) -> None:
        usual = {"rounds": 100_000, "min_clients": 3, "deadline_s": 60.0, "grace_s": 5.0, "evaluate_each_last": 0}
        typed = msgspec.convert(usual | said, RoundSettings)
        self.rules, self.state, self.now, self.eve, self.given = Rules(typed, Synchronous(typed, 0)), Round(), 0.0, eve, 0
        self.due: list[tuple[float, int, Event]] = []
        self.number, self.counted = itertools.count(), Counter[str]()
        self.slow: dict[str, float] = {}
        if eve is not None and not after_s:
            self(Connected("eve", 0.0))
        for name in HONEST:
            self(Connected(name, 0.0))
        self.until(after_s)
        if eve is not None and after_s:
            self(Connected("eve", self.now))

    def __call__(self, event: Event) -> None:
        taken = step(self.rules, self.state, event)
        self.state = taken.state
        for effect in taken.effects:
            match effect:
                case Open(work, number, devices):
                    for name in devices:
                        if name == "eve" and self.eve:
                            self.given += 1
                            self.eve(self, work, number)
                        else:
                            self.at(self.slow.get(name, TAKES_S), lambda t, n=name, w=work, r=number: Reported(n, r, t, w))
                case Aggregate(_, cohort):
                    self.counted.update(cohort)
                    self.at(0.0, Aggregated)

    def at(self, after_s: float, make: Callable[[float], Event]) -> None:
        event = make(self.now + after_s)
        if not isinstance(event, Connected) or not any(isinstance(other, Connected) for *_, other in self.due):
            heapq.heappush(self.due, (self.now + after_s, next(self.number), event))

    def until(self, end: float) -> None:
        while True:
            wake = next_wake(self.rules, self.state, self.now)
            first = self.due[0][0] if self.due else float("inf")
            if min(first, float("inf") if wake is None else wake) > end:
                self.now = end
                return
            if first <= (float("inf") if wake is None else wake):
                self.now, _, event = heapq.heappop(self.due)
                self(event)
            else:
                assert wake is not None
                self.now = wake
                self(Tick(wake))

    def rounds_in(self, seconds: float = HOUR_S) -> int:
        before = self.state.record.round
        self.until(self.now + seconds)
        return self.state.record.round - before


def says_progress(fleet: Fleet) -> None:
    for second in range(1, 60, 6):
        fleet.at(float(second), lambda t: DeviceProgressed("eve", t))


@cache
def quiet_rounds(**said: float) -> int:
    return Fleet(None, **said).rounds_in(HOUR_S / 2)


def never_evaluates(fleet: Fleet, work: str, number: int) -> None:
    if work == "train":
        fleet.at(TAKES_S, lambda t: Reported("eve", number, t))


def never_trains(fleet: Fleet, work: str, number: int) -> None:
    if work == "evaluate":
        fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))


def evaluates_every_second_time(fleet: Fleet, work: str, number: int) -> None:
    if work == "train" or number % 2:
        fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))


def every(interval: int, answers: bool = True) -> Hostile:
    """Answer every so many orders, or all but those, and report progress all the time."""

    def act(fleet: Fleet, work: str, number: int) -> None:
        says_progress(fleet)
        if (fleet.given % interval == 0) is answers:
            fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))

    return act


def comes_and_goes(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(0.1, lambda t: Disconnected("eve", t))
    fleet.at(4.9, lambda t: Connected("eve", t))


def connects_anew_after_each_order(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(61.0, lambda t: Connected("eve", t))
    fleet.at(6.0, lambda t: Connected("eve", t))


def leaves_for_good_each_time(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(0.1, lambda t: Disconnected("eve", t))
    fleet.at(6.0, lambda t: Connected("eve", t))


def says_late_that_it_cannot(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(4.5, lambda t: Excused("eve", t, troubled=True))


def answers_the_order_before(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(0.5, lambda t: Reported("eve", number - 1, t, work))


def just_before_the_deadline(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(0.95 * fleet.rules.settings.deadline_s, lambda t: Reported("eve", number, t, work))


def slowly_at_first_and_then_never(fleet: Fleet, work: str, number: int) -> None:
    """Raise the pace at first, and make use of it."""
    says_progress(fleet)
    if fleet.given <= 6:
        just_before_the_deadline(fleet, work, number)


def four_times_as_slow_and_then_never(fleet: Fleet, work: str, number: int) -> None:
    if fleet.given <= 6:
        fleet.at(4 * TAKES_S, lambda t: Reported("eve", number, t, work))


def only_when_it_is_late(fleet: Fleet, work: str, number: int) -> None:
    fleet.at(fleet.rules.settings.deadline_s + 0.1, lambda t: Reported("eve", number, t, work))


def in_turns(fleet: Fleet, work: str, number: int) -> None:
    """Change what it does from order to order."""
    STALLING[fleet.given % (len(STALLING) - 1)](fleet, work, number)


STALLING = [never_evaluates, never_trains, every(3), every(2), every(3, False), every(10, False), comes_and_goes]
STALLING += [connects_anew_after_each_order, leaves_for_good_each_time, says_late_that_it_cannot, answers_the_order_before]
STALLING += [just_before_the_deadline, slowly_at_first_and_then_never, four_times_as_slow_and_then_never, only_when_it_is_late]
STALLING += [evaluates_every_second_time, in_turns]


@pytest.mark.parametrize(
    ("deadline_s", "after_s", "evaluate_every"), [(600.0, 0.0, 7), (600.0, 0.0, 0), (600.0, 20.0, 1), (30.0, 0.0, 0)]
)
@pytest.mark.parametrize("eve", STALLING)
def test_a_device_costs_an_honest_fleet_a_tenth_of_its_rounds_at_most(
    eve: Hostile, deadline_s: float, evaluate_every: int, after_s: float
) -> None:
    """Take half an hour: the bound holds for it too, at half of the cost."""
    said = {"deadline_s": deadline_s, "evaluate_every": evaluate_every, "after_s": after_s}
    quiet, attacked = quiet_rounds(**said), Fleet(eve, **said).rounds_in(HOUR_S / 2)
    assert attacked >= 0.9 * quiet, f"{attacked} of {quiet}"


def test_a_device_that_never_evaluates_goes_on_to_train() -> None:
    fleet = Fleet(never_evaluates, evaluate_every=1)
    fleet.until(300.0)
    assert passed_over(fleet.state) == set()
    assert passed_over(fleet.state, "evaluate") == {"eve"}
    while fleet.state.record.phase is not Phase.TRAINING:
        fleet.until(fleet.now + 0.5)
    assert "eve" in fleet.state.record.devices


def test_a_much_slower_device_takes_part_now_and_then() -> None:
    fleet = Fleet(None, deadline_s=600.0)
    for name in ("dora", "emil", "fritz", "gero", "hans", "ines", "jutta", "karl", "lena"):
        fleet(Connected(name, fleet.now))
    fleet.slow["carl"] = 100.0
    before = fleet.counted["carl"]
    assert fleet.rounds_in() >= 0.9 * HOUR_S / TAKES_S
    assert 2 <= fleet.counted["carl"] - before <= 4


@pytest.mark.parametrize("takes_s", [8.0, 19.0])
def test_a_device_within_five_times_the_usual_is_waited_for_each_time(takes_s: float) -> None:
    fleet = Fleet(None)
    fleet.slow["carl"] = takes_s
    rounds = fleet.rounds_in()
    assert fleet.counted["carl"] >= rounds - 1 >= HOUR_S / takes_s - 8
    assert indebted(fleet.state.missed, fleet.now) == set()


def waits_in_evaluation(after: int, rounds: int, takes_s: float, **said: float) -> float:
    """Return for how long the evaluation after this round goes on while Eve, who has answered all before, is silent."""

    def stalls_once(fleet: Fleet, work: str, number: int) -> None:
        if (work, number) != ("evaluate", after):
            fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))

    fleet = Fleet(stalls_once, after_s=0.0, rounds=rounds, deadline_s=3600.0, evaluate_every=1, **said)
    while fleet.state.record.round < after or fleet.state.record.phase is not Phase.EVALUATING:
        fleet.slow = dict.fromkeys(HONEST, takes_s) if fleet.state.record.round == after - 1 else {}
        fleet.until(fleet.now + 0.5)
    begun = fleet.state.charged_at
    while fleet.state.record.phase is Phase.EVALUATING:
        fleet.until(fleet.now + 1.0)
    return fleet.now - begun


@pytest.mark.parametrize(("takes_s", "multiple"), [(100.0, 5.0), (100.0, 2.0), (7.0, 5.0)])
@pytest.mark.parametrize("after", [2, 6])
def test_a_device_that_stalls_in_the_last_evaluation_costs_as_much_as_in_any_other(
    takes_s: float, multiple: float, after: int
) -> None:
    last, other = (waits_in_evaluation(after, rounds, takes_s, deadline_multiple=multiple) for rounds in (after, after + 1))
    assert takes_s <= last == other <= takes_s + LONGEST_S + 1.0


def test_a_device_in_debt_is_evaluated_after_the_last_evaluation_if_not_in_it() -> None:
    fleet = Fleet(None, after_s=0.0, rounds=6, deadline_s=3600.0)
    while fleet.state.record.phase is not Phase.DONE:
        fleet.slow = {"carl": 200.0} if fleet.state.record.round < 4 else {"carl": 30.0}
        fleet.until(fleet.now + 0.5)
    assert "carl" in indebted(fleet.state.missed, fleet.now) and fleet.state.finished == set(HONEST) - {"carl"}
    fleet.until(fleet.now + 31.0)
    assert fleet.state.finished == set(HONEST)


def test_an_idle_device_is_asked_when_waiting_for_the_quorum_is_too_long() -> None:
    fleet = Fleet(never_trains, after_s=0.0, deadline_s=3600.0)
    assert fleet.rounds_in() > 0.9 * HOUR_S / TAKES_S


def test_a_fleet_that_becomes_slow_as_a_whole_keeps_its_deadline() -> None:
    fleet = Fleet(None, deadline_s=600.0)
    fleet.slow = dict.fromkeys(("bob", "carl"), 400.0)
    before = fleet.state.record.round
    fleet.until(fleet.now + 2000.0)
    assert passed_over(fleet.state) == set()
    assert 4 <= fleet.state.record.round - before <= 6


def test_where_it_is_switched_off_only_the_deadline_counts() -> None:
    fleet = Fleet(None, deadline_s=600.0, deadline_multiple=0)
    fleet.slow["ada"] = 200.0
    before = fleet.state.record.round
    fleet.until(fleet.now + 1000.0)
    assert fleet.state.record.round - before <= 6, "each round waits for it"
