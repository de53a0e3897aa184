"""Devices that cost the others time, by scripts of honest and hostile ones: events in, effects out, minutes in a moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter

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
from attune.fedserver.core.state import Round

WHILE_S = 1200.0
TAKES_S = 1.0
MISSED = 5  # rounds that a missed order costs: grace_s
HONEST = ("ada", "bob", "carl")
Hostile = Callable[["Fleet", str, int], None]  # what Eve does with her order of this work and round


class Fleet:
    """Honest devices that need a second for an order, and Eve, who gets each order at once."""

    def __init__(self, eve: Hostile | None, **said: object) -> None:
        usual = {"rounds": 100_000, "min_clients": 3, "deadline_s": 60.0, "grace_s": 5.0, "evaluate_each_last": 0}
        typed = msgspec.convert(usual | said, RoundSettings)
        self.rules, self.state, self.now, self.eve, self.given = Rules(typed, Synchronous(typed, 0)), Round(), 0.0, eve, 0
        self.due: list[tuple[float, Event]] = []
        self.slow: dict[str, float] = {}
        for name in HONEST:
            self(Connected(name, 0.0))
        self.until(20.0)
        if eve is not None:
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
                case Aggregate():
                    self.at(0.0, Aggregated)

    def at(self, after_s: float, make: Callable[[float], Event]) -> None:
        event = make(self.now + after_s)
        if not isinstance(event, Connected) or not any(isinstance(other, Connected) for _, other in self.due):
            self.due.append((self.now + after_s, event))

    def until(self, end: float) -> None:
        while True:
            self.due.sort(key=itemgetter(0))
            wake = next_wake(self.rules, self.state, self.now)
            first = self.due[0][0] if self.due else float("inf")
            if min(first, float("inf") if wake is None else wake) > end:
                self.now = end
                return
            if first <= (float("inf") if wake is None else wake):
                self.now, event = self.due.pop(0)
                self(event)
            else:
                assert wake is not None
                self.now = wake
                self(Tick(wake))

    def rounds_in_a_while(self) -> int:
        before = self.state.record.round
        self.until(self.now + WHILE_S)
        return self.state.record.round - before


def says_progress(fleet: Fleet) -> None:
    for second in range(1, 60):
        fleet.at(float(second), lambda t: DeviceProgressed("eve", t))


def never_evaluates(fleet: Fleet, work: str, number: int) -> None:
    if work == "train":
        fleet.at(TAKES_S, lambda t: Reported("eve", number, t))


def never_trains(fleet: Fleet, work: str, number: int) -> None:
    if work == "evaluate":
        fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))


def every(interval: int) -> Hostile:
    """Answer every so many orders, and report progress all the time."""

    def act(fleet: Fleet, work: str, number: int) -> None:
        says_progress(fleet)
        if fleet.given % interval == 0:
            fleet.at(TAKES_S, lambda t: Reported("eve", number, t, work))

    return act


def all_but_every(interval: int) -> Hostile:
    def act(fleet: Fleet, work: str, number: int) -> None:
        says_progress(fleet)
        if fleet.given % interval:
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


STALLING = [never_evaluates, never_trains, every(3), every(2), all_but_every(3), all_but_every(10), comes_and_goes]
STALLING += [connects_anew_after_each_order, leaves_for_good_each_time, says_late_that_it_cannot, answers_the_order_before]


@cache
def quiet_rounds(evaluate_every: int) -> int:
    return Fleet(None, deadline_s=600.0, evaluate_every=evaluate_every).rounds_in_a_while()


@pytest.mark.parametrize("evaluate_every", [0, 1])
@pytest.mark.parametrize("eve", STALLING)
def test_a_device_costs_an_honest_fleet_a_tenth_of_its_rounds_at_most(eve: Hostile, evaluate_every: int) -> None:
    quiet, attacked = (
        quiet_rounds(evaluate_every),
        Fleet(eve, evaluate_every=evaluate_every, deadline_s=600.0).rounds_in_a_while(),
    )
    assert attacked >= 0.9 * quiet - MISSED, f"{attacked} of {quiet}"


def test_a_device_that_never_evaluates_goes_on_to_train() -> None:
    fleet = Fleet(never_evaluates, evaluate_every=1)
    fleet.until(300.0)
    assert passed_over(fleet.state) == set()
    assert passed_over(fleet.state, "evaluate") == {"eve"}
    while fleet.state.record.phase is not Phase.TRAINING:
        fleet.until(fleet.now + 0.5)
    assert "eve" in fleet.state.record.devices


def test_a_slow_honest_device_is_waited_for_once_it_has_shown_how_long_it_takes() -> None:
    fleet = Fleet(None, deadline_s=600.0, deadline_multiple=0)
    for name in ("dora", "emil", "fritz", "gero", "hans", "ines", "jutta", "karl", "lena"):
        fleet(Connected(name, fleet.now))
    fleet.slow["carl"] = 100.0
    fleet.until(fleet.now + 250.0)
    typed = msgspec.structs.replace(fleet.rules.settings, deadline_multiple=5.0)
    fleet.rules = Rules(typed, Synchronous(typed, 0))
    assert fleet.state.pace["train"].usual_s == TAKES_S
    before = fleet.state.record.round
    fleet.until(fleet.now + 1000.0)
    assert passed_over(fleet.state) == set()
    assert 9 <= fleet.state.record.round - before <= 11


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
