"""The round by transcripts: events in, effects out; no clock, no sleeping, no mocks."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from attune.common.config import RoundSettings
from attune.fedserver.core.messages import (
    Acknowledge,
    Aggregate,
    Aggregated,
    AskAgain,
    Connected,
    DeviceProgressed,
    Disconnected,
    Effect,
    Event,
    Excused,
    Expelled,
    FinishDevices,
    Open,
    PassOver,
    Paused,
    Phase,
    Record,
    Reported,
    Resumed,
    StepFailed,
    SummedChanges,
    Tick,
)
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.policy import Synchronous, passed_over, quorum_of
from attune.fedserver.core.round import left_s, next_wake, step
from attune.fedserver.core.state import Round

Evaluated = partial(Reported, work="evaluate")


class Transcript:
    """Round that is played. It remembers its state and every event."""

    def __init__(self, rules: Rules, state: Round) -> None:
        self.rules, self.state, self.begun = rules, state, state
        self.events: list[tuple[Event, float]] = []

    @property
    def record(self) -> Record:
        return self.state.record

    @property
    def quorum(self) -> int:
        return quorum_of(self.rules.settings, self.record)

    def play(self, *events: Event, unix: float = 0.0) -> list[Effect]:
        """Return the effects of the last event."""
        for event in events:
            self.events.append((event, unix))
            taken = step(self.rules, self.state, event, unix)
            self.state = taken.state
        return list(taken.effects)

    def next_wake(self, now: float) -> float | None:
        return next_wake(self.rules, self.state, now)

    def played_again(self) -> Round:
        """Return the state after the same events."""
        state = self.begun
        for event, unix in self.events:
            state = step(self.rules, state, event, unix).state
        return state

    def restarted(self, reported: set[str] | None = None, finished: set[str] | None = None) -> Transcript:
        """Return the state that another process makes of the record."""
        record = msgspec.json.decode(msgspec.json.encode(self.record), type=Record)
        return Transcript(self.rules, Round.of(record, reported or set(), finished or set()))


def round_of(
    record: Record | None = None, reported: set[str] | None = None, common: bool = False, **said: object
) -> Transcript:
    given_settings = {
        "rounds": 2, "min_clients": 2, "deadline_s": 100.0, "grace_s": 10.0, "evaluate_each_last": 0, **said
    }  # fmt: skip
    typed = msgspec.convert(given_settings, RoundSettings)
    return Transcript(Rules(typed, Synchronous(typed, 0), common), Round.of(record or Record(), reported or set()))


def begun(names: str = "ab", **said: Any) -> Transcript:
    """Return a round as `round_of` does, after these devices have connected."""
    m = round_of(**said)
    m.play(*(Connected(name, 0) for name in names))
    return m


def test_a_whole_federation_of_two_rounds() -> None:
    m = round_of()
    assert m.play(Connected("a", 0)) == []
    assert m.record.phase is Phase.WAITING
    assert m.play(Connected("b", 1)) == [Open("train", 1, ("a", "b"))]
    assert m.play(Reported("b", 1, 2)) == [Acknowledge("b", accepted=True)]
    assert m.play(Reported("a", 1, 3)) == [Acknowledge("a", accepted=True), Aggregate(1, ("a", "b"))]
    assert m.record.phase is Phase.AGGREGATING
    assert m.play(Aggregated(4)) == [Open("train", 2, ("a", "b"))]
    assert m.record.round == 1
    m.play(Reported("a", 2, 5))
    assert m.play(Reported("b", 2, 6)) == [Acknowledge("b", accepted=True), Aggregate(2, ("a", "b"))]
    assert m.play(Aggregated(7)) == [Open("evaluate", 2, ("a", "b"))]
    assert m.record.phase is Phase.EVALUATING
    m.play(Evaluated("a", 2, 8))
    assert m.play(Evaluated("b", 2, 9)) == [Acknowledge("b", accepted=True), FinishDevices(("a", "b"))]
    assert m.record.phase is Phase.DONE
    assert m.next_wake(10) is None


def test_a_pause_lets_the_open_round_end_and_opens_no_other_across_a_restart() -> None:
    m = round_of()
    assert m.play(Paused(True, 0)) == []
    m.play(Connected("a", 0))
    assert m.play(Connected("b", 0)) == []
    assert m.play(Paused(False, 1)) == [Open("train", 1, ("a", "b"))]
    m.play(Reported("a", 1, 2))
    assert m.play(Paused(True, 3)) == []
    assert m.play(Reported("b", 1, 4)) == [Acknowledge("b", accepted=True), Aggregate(1, ("a", "b"))]
    assert m.play(Aggregated(5)) == []
    assert (m.record.phase, m.record.round, m.record.paused) == (Phase.WAITING, 1, True)
    again = m.restarted()
    again.play(Resumed(0), Connected("a", 0))
    assert again.play(Connected("b", 0)) == []
    assert again.play(Tick(1000)) == []
    assert again.play(Paused(False, 1001)) == [Open("train", 2, ("a", "b"))]
    assert again.play(Paused(False, 1002)) == []


def test_after_the_end_a_pause_makes_newcomers_wait_and_nobody_else() -> None:
    m = done()
    m.play(Paused(True, 0))
    assert m.play(Connected("x", 0, newcomer=True)) == []
    assert m.play(Connected("late", 1)) == [Open("evaluate", 2, ("late",))]
    assert m.play(Paused(False, 2)) == [Open("train", 3, ("x",))]


def test_repeating_an_event_changes_nothing() -> None:
    m = begun()
    m.play(Reported("a", 1, 1))
    before = msgspec.json.encode(m.record)
    assert m.play(Reported("a", 1, 2)) == [Acknowledge("a", accepted=True)]
    assert m.play(Tick(3)) == []
    assert msgspec.json.encode(m.record) == before


@pytest.mark.parametrize("event", [Reported("a", 2, 1), Reported("a", 0, 1), Reported("stranger", 1, 1)])
def test_answers_to_other_rounds_and_of_strangers_are_late(event: Reported) -> None:
    m = begun()
    assert m.play(event) == [Acknowledge(event.name, accepted=False)]
    assert m.state.reported == set()


def test_the_deadline_closes_a_round_that_has_its_quorum() -> None:
    m = begun(quorum=1)
    m.play(Reported("a", 1, 50))
    assert m.next_wake(50) == 100
    assert m.play(Tick(99)) == []
    assert m.play(Tick(100)) == [Aggregate(1, ("a",))]


def test_without_a_quorum_the_deadline_orders_again_and_takes_newcomers_in() -> None:
    m = begun(quorum=2)
    m.play(Reported("a", 1, 1), Connected("c", 3))
    assert m.record.devices == ("a", "b")
    assert m.play(Tick(100)) == [Open("train", 1, ("b", "c"))]
    assert m.state.deadline == 200
    closed = m.play(Reported("c", 1, 101))
    assert closed == [PassOver(("b",)), Acknowledge("c", accepted=True), Aggregate(1, ("a", "c"))], "b has cost 99 seconds"


def test_when_nobody_is_left_to_wait_for_a_newcomer_is_taken_in_at_once() -> None:
    m = begun(quorum=2)
    m.play(Reported("a", 1, 1))
    assert m.play(Excused("b", 2)) == []
    assert m.play(Connected("c", 3)) == [Open("train", 1, ("b", "c"))]
    assert m.play(Connected("d", 4)) == [], "c is awaited: d joins the next round"
    assert m.play(Reported("c", 1, 5)) == [Acknowledge("c", accepted=True), Aggregate(1, ("a", "c"))]


def test_a_dead_device_holds_a_round_no_longer_than_its_grace() -> None:
    m = begun(quorum=1)
    m.play(Disconnected("b", 5))
    assert m.play(Reported("a", 1, 6)) == [Acknowledge("a", accepted=True)]
    assert m.next_wake(6) == 15
    assert m.play(Tick(15)) == [Aggregate(1, ("a",))]


def test_a_device_that_returns_within_its_grace_gets_its_order_again() -> None:
    m = begun(quorum=1)
    m.play(Disconnected("b", 5), Reported("a", 1, 6))
    assert m.play(Connected("b", 14)) == [Open("train", 1, ("b",))]
    assert m.play(Tick(15)) == []
    assert m.play(Reported("b", 1, 16))[-1] == Aggregate(1, ("a", "b"))


def test_sampling_is_seeded_and_over_selection_takes_the_first_answers() -> None:
    def cohort(order: str) -> tuple[str, ...]:
        m = round_of(min_clients=5, clients=2, over_selection=0.5)
        effects = [effect for name in order for effect in m.play(Connected(name, 0))]
        assert isinstance(effects[0], Open)
        return effects[0].devices

    assert len(cohort("abcde")) == 3
    assert cohort("abcde") == cohort("edcba")

    m = begun("abcde", min_clients=5, clients=2, over_selection=0.5)
    first, second, third = m.record.devices
    m.play(Reported(third, 1, 1))
    assert m.play(Reported(first, 1, 2))[-1] == Aggregate(1, tuple(sorted([first, third])))
    assert m.play(Reported(second, 1, 3)) == [Acknowledge(second, accepted=False)]


def test_train_all_orders_everyone_and_aggregates_the_cohort_only() -> None:
    m = round_of(min_clients=4, clients=2, train="all")
    assert m.play(*(Connected(name, 0) for name in "abcd")) == [Open("train", 1, ("a", "b", "c", "d"))]
    assert len(m.record.cohort) == 2
    for name in "abc":
        assert len(m.play(Reported(name, 1, 1))) == 1
    assert m.play(Reported("d", 1, 2))[-1] == Aggregate(1, tuple(m.record.cohort))


def test_too_few_devices_wait_and_never_fail() -> None:
    m = round_of(rounds=1)
    m.play(Connected("a", 0), Disconnected("a", 1))
    for now in (1e3, 1e6):
        assert m.play(Tick(now)) == []
    assert m.record.phase is Phase.WAITING


def test_after_a_restart_in_training_the_round_goes_on_from_the_inbox() -> None:
    m = begun()
    m.play(Reported("a", 1, 1))
    again = round_of(m.record, {"a"})
    assert again.play(Resumed(50)) == []
    assert again.play(Connected("a", 51)) == []
    assert again.play(Connected("b", 52)) == [Open("train", 1, ("b",))]
    assert again.play(Reported("b", 1, 53))[-1] == Aggregate(1, ("a", "b"))


def test_after_a_restart_in_aggregating_the_same_updates_are_aggregated() -> None:
    record = Record(phase=Phase.AGGREGATING, devices=("a", "b", "c"), cohort=("a", "b", "c"))
    assert round_of(record, {"a", "b"}).play(Resumed(9)) == [Aggregate(1, ("a", "b"))]


def test_a_failure_is_tried_again_after_a_restart() -> None:
    m = begun()
    m.play(Reported("a", 1, 1), Reported("b", 1, 1))
    assert m.play(StepFailed("disk full")) == []
    assert (m.record.phase, m.record.reason) == (Phase.FAILED, "disk full")
    again = round_of(m.record.revive(), {"a", "b"})
    assert again.play(Resumed(2)) == [Aggregate(1, ("a", "b"))]


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_latecomer_is_evaluated_and_finished_after_the_end(newcomer: bool) -> None:
    """Without rounds for newcomers a newcomer is a latecomer."""
    record = Record(phase=Phase.DONE, round=2, devices=("a",))
    m = round_of(record, {"a"})
    assert m.play(Connected("a", 0)) == [FinishDevices(("a",))]
    assert m.play(Connected("z", 1, newcomer=newcomer)) == [Open("evaluate", 2, ("z",))]
    assert m.play(Evaluated("z", 2, 2)) == [Acknowledge("z", accepted=True), FinishDevices(("z",))]


def test_a_device_that_has_lost_its_state_is_served_once_more_after_the_end() -> None:
    m = round_of(Record(phase=Phase.DONE, round=2, devices=("a",)), {"a"})
    assert m.play(Connected("a", 0, empty=True)) == [Open("evaluate", 2, ("a",))]
    assert m.play(Evaluated("a", 2, 1)) == [Acknowledge("a", accepted=True), FinishDevices(("a",))]
    assert m.play(Connected("a", 2)) == [FinishDevices(("a",))]


def test_the_evaluation_waits_for_the_absent_only_through_their_grace() -> None:
    m = begun(rounds=1, quorum=1)
    m.play(Reported("a", 1, 1), Disconnected("b", 2), Tick(12))
    assert m.play(Aggregated(13)) == [Open("evaluate", 1, ("a",))]
    assert m.play(Evaluated("a", 1, 14)) == [Acknowledge("a", accepted=True), FinishDevices(("a",))]


def orders_of(m: Transcript) -> list[tuple[str, int]]:
    """Return every order of a whole run of two devices, a and b, that always answer."""
    opened = []
    while m.record.phase is not Phase.DONE:
        work, number = m.record.open_orders
        opened.append((work, number))
        m.play(Reported("a", number, 1, work), Reported("b", number, 1, work))
        if m.record.phase is Phase.AGGREGATING:
            m.play(Aggregated(2))
    return opened


@pytest.mark.parametrize(
    ("every", "said", "evaluated"),
    [
        (2, {}, [2, 4, 6, 7]),
        (2, {"evaluate_last": 1}, [7]),
        (2, {"evaluate_last": 3}, [6, 7]),  # the last three rounds are 5, 6 and 7
        (2, {"evaluate_last": 4}, [4, 6, 7]),
        (2, {"evaluate_last": 99}, [2, 4, 6, 7]),
        (0, {"evaluate_last": 3}, [7]),  # without `evaluate_every` there is only the evaluation at the end
        (3, {"evaluate_each_last": 2}, [3, 6, 7]),
        (3, {"evaluate_each_last": 3}, [3, 5, 6, 7]),
        (0, {"evaluate_each_last": 2}, [6, 7]),
    ],
)
def test_evaluations_in_the_last_rounds_or_each_of_them(every: int, said: dict[str, int], evaluated: list[int]) -> None:
    """Check the rounds that FedMCSA's figures need: each of the last twenty, and a few of the others.

    The results after the last round but one are the prior of the last evaluation, so that round is evaluated by default.
    """
    assert RoundSettings().evaluate_each_last == 2
    opened = orders_of(begun(rounds=7, evaluate_every=every, **said))
    trained = [("train", number) for number in range(1, 8)]
    assert opened == sorted(trained + [("evaluate", number) for number in evaluated], key=lambda of: (of[1], of[0] != "train"))


def done(**policy: object) -> Transcript:
    """Return a finished federation of a and b, both gone, with rounds for newcomers."""
    record = Record(phase=Phase.DONE, round=2, devices=("a", "b"), last_cohort=("a", "b"))
    return round_of(record, {"a", "b"}, adapt_rounds=2, **policy)


def test_newcomers_get_their_rounds_and_an_evaluation_before_the_run_ends_again() -> None:
    m = done()
    assert m.play(Connected("x", 0, newcomer=True)) == [Open("train", 3, ("x",))]
    assert (m.record.phase, m.record.adapting, m.quorum) == (Phase.TRAINING, {"x": 0}, 1)
    assert m.play(Connected("y", 1, newcomer=True)) == [], "takes part from the next round on"
    assert m.play(Reported("x", 3, 2)) == [Acknowledge("x", accepted=True), Aggregate(3, ("x",))]
    assert m.play(Aggregated(3)) == [Open("train", 4, ("x", "y"))]
    m.play(Reported("y", 4, 4))
    assert m.play(Reported("x", 4, 5))[-1] == Aggregate(4, ("x", "y"))
    assert m.play(Connected("z", 6, newcomer=True)) == []
    assert m.play(Aggregated(7)) == [Open("train", 5, ("y",))], "x had its two; z comes too late for these"
    m.play(Reported("y", 5, 8))
    assert m.play(Aggregated(9)) == [Open("evaluate", 5, ("x", "y"))]
    m.play(Evaluated("x", 5, 10))
    assert m.play(Evaluated("y", 5, 11)) == [
        Acknowledge("y", accepted=True),
        FinishDevices(("x", "y")),
        Open("train", 6, ("z",)),
    ]
    m.play(Reported("z", 6, 12), Aggregated(13), Reported("z", 7, 14))
    assert m.play(Aggregated(15)) == [Open("evaluate", 7, ("z",))]
    assert m.play(Evaluated("z", 7, 16)) == [Acknowledge("z", accepted=True), FinishDevices(("z",))]
    assert (m.record.phase, m.record.round, m.record.adapting) == (Phase.DONE, 7, {})


def test_old_clients_are_not_disturbed_by_newcomers() -> None:
    m = done(rounds=2)
    m.play(Connected("x", 0, newcomer=True))
    assert m.play(Connected("a", 1)) == [FinishDevices(("a",))], "it has evaluated the end"
    assert m.play(Connected("c", 2)) == [], "it has not, and evaluates with the newcomers"
    m.play(Reported("x", 3, 3), Aggregated(4), Reported("x", 4, 5))
    assert m.play(Aggregated(6)) == [Open("evaluate", 4, ("c", "x"))]
    assert m.play(Connected("b", 7)) == [FinishDevices(("b",))]
    m.play(Evaluated("x", 4, 8))
    assert m.play(Evaluated("c", 4, 9))[-1] == FinishDevices(("c", "x"))
    assert m.play(Connected("b", 10)) == [FinishDevices(("b",))]


def test_where_everybodys_state_moves_who_comes_back_evaluates_it() -> None:
    m = done(common=True)
    m.play(Connected("x", 0, newcomer=True))
    for number in (3, 4):
        m.play(Reported("x", number, 1), Aggregated(2))
    m.play(Evaluated("x", 4, 3))
    assert m.record.phase is Phase.DONE
    assert m.play(Connected("a", 4)) == [Open("evaluate", 4, ("a",))]
    assert m.play(Evaluated("a", 4, 5)) == [Acknowledge("a", accepted=True), FinishDevices(("a",))]
    assert m.play(Connected("x", 6)) == [FinishDevices(("x",))]


def test_newcomers_that_go_away_hold_nobody_up() -> None:
    m = done()
    m.play(Connected("x", 0, newcomer=True), Connected("c", 1), Disconnected("x", 5))
    assert m.next_wake(6) == 15
    assert m.play(Tick(15)) == [Open("evaluate", 2, ("c",))]
    assert m.play(Evaluated("c", 2, 16)) == [Acknowledge("c", accepted=True), FinishDevices(("c",))]
    assert (m.record.phase, m.record.round) == (Phase.DONE, 2)
    assert m.play(Connected("x", 20, newcomer=True)) == [Open("train", 3, ("x",))]


def test_a_newcomer_that_can_train_nothing_is_not_asked_for_ever() -> None:
    m = done()
    m.play(Connected("x", 0, newcomer=True))
    assert m.play(Excused("x", 1)) == [Open("evaluate", 2, ("x",))]
    assert m.play(Evaluated("x", 2, 2)) == [Acknowledge("x", accepted=True), FinishDevices(("x",))]


def test_one_newcomer_of_two_is_enough_and_the_other_is_counted_as_served() -> None:
    m = done()
    m.play(Connected("x", 0, newcomer=True), Connected("y", 0, newcomer=True), Reported("x", 3, 1))
    assert m.play(Aggregated(2)) == [Open("train", 4, ("x", "y"))]
    m.play(Reported("x", 4, 3))
    assert m.play(Tick(102)) == [Aggregate(4, ("x",))]
    assert m.play(Aggregated(103)) == [Open("train", 5, ("y",))]
    assert m.play(Tick(203)) == [PassOver(("y",)), Open("evaluate", 4, ("x", "y"))]


def test_after_a_restart_an_adaptation_goes_on_where_it_was() -> None:
    m = done()
    m.play(Connected("x", 0, newcomer=True), Connected("y", 0, newcomer=True), Reported("x", 3, 1))
    again = m.restarted({"x"})
    assert again.play(Resumed(50)) == [Aggregate(3, ("x",))]
    assert again.play(Aggregated(51)) == [Open("train", 4, ())], "nobody is back yet, and x has its grace"
    third = again.restarted(finished={"a", "b"})
    assert third.play(Resumed(60)) == []
    assert third.play(Connected("a", 61)) == [FinishDevices(("a",))]
    assert third.play(Connected("x", 62)) == [Open("train", 4, ("x",))]
    third.play(Reported("x", 4, 63))
    assert third.play(Aggregated(64)) == [Open("evaluate", 4, ("x",))]


def test_who_never_contributed_is_a_newcomer_when_the_rounds_are_over() -> None:
    m = round_of(rounds=1, min_clients=3, clients=1, quorum=1, adapt_rounds=1)
    m.play(*(Connected(name, 0, newcomer=True) for name in "abc"))
    [sampled] = m.record.cohort
    others = tuple(sorted({"a", "b", "c"} - {sampled}))
    m.play(Reported(sampled, 1, 1))
    assert m.play(Aggregated(2)) == [Open("evaluate", 1, ("a", "b", "c"))]
    m.play(Evaluated("a", 1, 3), Evaluated("b", 1, 3))
    assert m.play(Evaluated("c", 1, 3))[1:] == [FinishDevices((sampled,)), Open("train", 2, others)]


def test_who_comes_during_the_last_evaluation_is_evaluated_after_it() -> None:
    m = round_of(Record(phase=Phase.EVALUATING, round=2, devices=("a",)))
    m.play(Resumed(0), Connected("a", 0))
    assert m.play(Connected("z", 1)) == []
    assert m.play(Evaluated("a", 2, 2))[1:] == [FinishDevices(("a",)), Open("evaluate", 2, ("z",))]
    assert m.play(Evaluated("z", 2, 3)) == [Acknowledge("z", accepted=True), FinishDevices(("z",))]


# --- updates that are sent again


def test_an_update_that_is_sent_again_after_a_failure_is_answered_accepted() -> None:
    """Expect this, because the inbox has the update; a late answer would delete it."""
    m = begun()
    m.play(Reported("a", 1, 1), StepFailed("disk full"))
    assert m.play(Reported("a", 1, 2)) == [Acknowledge("a", accepted=True)]
    assert m.play(Reported("b", 1, 3)) == [Acknowledge("b", accepted=True)], "it is in the inbox, and counts after the restart"
    assert m.play(Reported("c", 1, 3)) == [Acknowledge("c", accepted=False)]
    assert m.play(Resumed(4)) == [Aggregate(1, ("a", "b"))]


def test_an_update_sent_again_during_or_after_aggregation_is_accepted() -> None:
    m = begun(quorum=1)
    m.play(Excused("b", 1), Reported("a", 1, 1))
    for event in (Tick(2), StepFailed("no memory")):
        m.play(event)
        assert m.play(Reported("a", 1, 2)) == [Acknowledge("a", accepted=True)]
        assert m.play(Reported("b", 1, 2)) == [Acknowledge("b", accepted=False)], "the round was closed without it"
    assert m.play(Resumed(3)) == [Aggregate(1, ("a",))]
    m.play(Aggregated(4))
    assert m.play(Reported("a", 1, 5)) == [Acknowledge("a", accepted=True)]
    assert "a" not in m.state.reported


def test_an_update_of_the_last_round_is_no_evaluation_of_it() -> None:
    m = begun(rounds=1)
    m.play(Reported("a", 1, 1), Reported("b", 1, 1), Aggregated(2))
    assert m.record.phase is Phase.EVALUATING
    assert m.play(Reported("a", 1, 3)) == [Acknowledge("a", accepted=True)]
    assert m.state.awaited == {"a", "b"}


def test_a_second_failure_leaves_the_step_to_try_again_as_it_is() -> None:
    m = begun()
    m.play(StepFailed("disk full"), StepFailed("disk still full"))
    assert (m.record.reason, m.record.revive().phase) == ("disk still full", Phase.TRAINING)
    assert m.play(Resumed(5)) == [Open("train", 1, ("a", "b"))]
    assert m.record.phase is Phase.TRAINING


def test_a_step_leaves_the_state_before_it_as_it_was() -> None:
    """Check this, because a commit that fails then needs no way back."""
    m = begun()
    m.play(Reported("a", 1, 1))
    before, kept = m.state, msgspec.json.encode(m.record)
    m.play(Reported("b", 1, 2), Aggregated(3))
    assert (before.reported, msgspec.json.encode(before.record)) == ({"a"}, kept)
    assert step(m.rules, before, Reported("b", 1, 2)).effects == (Acknowledge("b", accepted=True), Aggregate(1, ("a", "b")))


# --- time


def test_a_clock_set_back_by_an_hour_moves_no_deadline() -> None:
    """Set the time of day from 3,600 s back to 0 while a training hangs; it is only shown."""
    m = round_of(quorum=1, deadline_s=600)
    m.play(Connected("a", 50), Connected("b", 50), unix=3600)
    m.play(Reported("a", 1, 99), unix=3649)
    assert m.record.opened_at == 3600
    m.play(Tick(100), unix=50)
    assert (left_s(m.rules, m.state, 100), m.next_wake(100)) == (550, 350), "b stalls at 350"
    assert m.play(Tick(650), unix=600) == [Aggregate(1, ("a",))]


def test_the_deadline_counts_anew_from_a_restart() -> None:
    again = begun(quorum=1).restarted()
    again.play(Resumed(3))
    assert again.next_wake(3) == 13, "the grace of the absent"
    assert left_s(again.rules, again.state, 3) == 100


def test_after_the_end_a_latecomer_has_the_whole_span() -> None:
    m = round_of(Record(phase=Phase.DONE, round=2))
    m.play(Connected("z", 5000))
    assert left_s(m.rules, m.state, 5000) == 100


# --- devices that slow all others down


def rounds_in(m: Transcript, answering: str, until: float) -> list[float]:
    """Return the duration of each round if only these devices answer, a second after they are asked."""
    now, spans = 0.0, []
    while now < until and m.record.phase is Phase.TRAINING:
        opened = now
        now += 1
        m.play(*(Reported(name, m.record.round + 1, now) for name in answering))
        while m.record.phase is Phase.TRAINING:
            wake = m.next_wake(now)
            assert wake is not None
            now = max(now, wake)
            m.play(Tick(now))
        m.play(Aggregated(now))
        spans.append(now - opened)
    return spans


def hung(**said: object) -> Transcript:
    """Let a and b answer; c is connected and never does."""
    m = begun("abc", rounds=1000, stall_s=0, **said)
    m.play(Disconnected("c", 0.1))  # the first round has opened with a and b only
    m.play(Connected("c", 0.2))
    return m


def test_a_device_that_hangs_costs_one_deadline_and_no_more() -> None:
    assert rounds_in(hung(), "ab", 210) == [1, 100, *[1] * 109]


def test_who_shows_no_progress_costs_the_stall_and_no_more() -> None:
    m = begun("abc", rounds=100, stall_s=20)
    assert rounds_in(m, "ab", 45) == [1, 20, *[1] * 24]
    assert passed_over(m.state) == {"c"}


def test_progress_keeps_a_device_from_stalling() -> None:
    m = begun(quorum=1, stall_s=20)
    m.play(DeviceProgressed("a", 15), Reported("b", 1, 16))
    assert m.play(Tick(20)) == []
    assert m.next_wake(20) == 35
    assert m.play(Tick(35)) == [Aggregate(1, ("b",))]


def test_without_a_quorum_who_stalls_is_waited_for_until_the_deadline() -> None:
    m = begun(stall_s=20)
    m.play(Reported("a", 1, 1))
    assert m.play(Tick(20)) == []
    assert m.next_wake(20) == 100


@pytest.mark.parametrize("sign", [DeviceProgressed("c", 205), Connected("c", 205), Reported("c", 3, 205)])
def test_who_was_passed_over_is_asked_again_when_it_shows_that_it_can(sign: Event) -> None:
    m = hung()
    rounds_in(m, "ab", 201)
    assert passed_over(m.state) == {"c"}
    assert "c" not in m.record.devices
    assert AskAgain(("c",)) in m.play(sign)
    effects = m.play(*(Reported(name, m.record.round + 1, 206) for name in "ab"))
    assert effects[-1] == Aggregate(m.record.round + 1, ("a", "b"))
    assert m.play(Aggregated(207)) == [Open("train", m.record.round + 1, ("a", "b", "c"))]


def test_a_single_order_that_ran_out_is_forgiven_by_an_answer_and_not_by_progress() -> None:
    m = hung()
    assert rounds_in(m, "ab", 100) == [1, 100]
    m.play(DeviceProgressed("c", 102))
    assert m.state.missed["train"]["c"].in_row == 1
    m.play(Reported("c", m.record.round + 1, 103))
    assert m.state.missed["train"]["c"].in_row == 0


def test_a_device_that_missed_orders_is_asked_if_no_round_works_without_it() -> None:
    m = begun(rounds=100, quorum=1, stall_s=0)
    assert rounds_in(m, "a", 120) == [100, *[1] * 20], "it is asked, and nobody waits for it"
    assert m.record.devices == ("a", "b")


def test_without_a_quorum_devices_that_missed_orders_are_asked_only_if_needed() -> None:
    m = begun(rounds=100, stall_s=0)
    m.play(Tick(100), Tick(200))
    assert passed_over(m.state) == {"a", "b"}
    assert m.play(Tick(300)) == [Open("train", 1, ("a", "b"))], "there is no quorum without them"
    m.play(Connected("a", 301))
    assert m.play(Connected("c", 302)) == []
    assert m.play(Tick(400)) == [Open("train", 1, ("a", "c"))]


def test_the_evaluation_does_not_wait_for_who_was_passed_over() -> None:
    m = hung(evaluate_every=4)
    rounds_in(m, "ab", 202)
    assert m.record.phase is Phase.EVALUATING
    assert m.record.devices == ("a", "b")


def test_a_member_that_stays_away_is_replaced_by_an_idle_device() -> None:
    m = begun("abcd", min_clients=2, clients=2)
    gone, stays = m.record.cohort
    idle = set("abcd") - {gone, stays}
    m.play(Disconnected(gone, 5))
    assert m.next_wake(6) == 15
    [opened] = m.play(Tick(15))
    assert isinstance(opened, Open)
    [other] = opened.devices
    assert other in idle
    assert (set(m.record.cohort), m.record.replaced) == ({stays, other}, (gone,))
    m.play(Connected(gone, 16), Reported(stays, 1, 17))
    assert m.play(Reported(gone, 1, 18)) == [Acknowledge(gone, accepted=True)], "what it did meanwhile counts as well"
    assert m.play(Reported(other, 1, 19))[-1] == Aggregate(1, tuple(sorted((gone, stays, other))))


def test_the_draw_of_a_replacement_is_seeded() -> None:
    def replaced(order: str) -> Record:
        m = begun(order, min_clients=8, clients=3)
        m.play(*(Disconnected(gone, 1) for gone in m.record.cohort[:2]), Tick(11))
        return m.record

    assert replaced("abcdefgh") == replaced("hgfedcba")
    assert len(set(replaced("abcdefgh").cohort)) == 3


@pytest.mark.parametrize(("after_s", "replaced"), [(-1, False), (0, True), (4, True)])
def test_replacement_can_be_sooner_than_the_grace_and_off(after_s: float, replaced: bool) -> None:
    m = begun("abc", min_clients=2, clients=2, replace_after_s=after_s)
    gone = m.record.cohort[0]
    m.play(Disconnected(gone, 5))
    due = 5 + (after_s or 10)
    assert (m.next_wake(5) == due) is (after_s != -1)
    assert bool(m.play(Tick(due))) is replaced


def closed_under_churn(**said: object) -> int:
    """Count the rounds closed in 75 s by 20 devices, eight a round, that leave 63 times; training takes two seconds.

    Every sixth device that leaves stays away for 40 s, the others for two.
    """
    m = round_of(rounds=1000, min_clients=8, clients=8, grace_s=2, deadline_s=600, **said)
    draw, here, away, answers = random.Random(7), set[str](), dict[str, float](), dict[str, float]()
    names = [f"device{number:02d}" for number in range(20)]
    leaves = sorted(draw.uniform(0, 75) for _ in range(63))

    def play(event: Event, now: float) -> None:
        for effect in m.play(event):
            if isinstance(effect, Open):
                answers.update(dict.fromkeys(effect.devices, now + 2))
            if isinstance(effect, Aggregate):
                answers.clear()
                play(Aggregated(now), now)

    for tenth in range(750):
        now = tenth / 10
        for name in names:
            if name not in here and away.get(name, 0) <= now:
                here.add(name)
                play(Connected(name, now), now)
        while leaves and leaves[0] <= now and here:
            leaves.pop(0)
            name = draw.choice(sorted(here))
            here.remove(name)
            answers.pop(name, None)
            away[name] = now + (40 if len(leaves) % 6 == 0 else 2)
            play(Disconnected(name, now), now)
        for name in [name for name, due in sorted(answers.items()) if due <= now]:
            if answers.pop(name, None) is not None:
                play(Reported(name, m.record.round + 1, now), now)
        wake = m.next_wake(now)
        if wake is not None and wake <= now + 0.1:
            play(Tick(now + 0.1), now + 0.1)
    return m.record.round


def test_rounds_go_on_closing_while_devices_leave() -> None:
    assert closed_under_churn(replace_after_s=-1) == 7
    assert closed_under_churn() == 18


# --- any history

NAMES = st.sampled_from("abcdef")
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Connected, NAMES, st.just(0.0)),
    st.builds(Disconnected, NAMES, st.just(0.0)),
    st.builds(Reported, NAMES, st.integers(0, 4), st.just(0.0), st.sampled_from(["train", "evaluate"])),
    st.builds(DeviceProgressed, NAMES, st.just(0.0)),
    st.builds(Excused, NAMES, st.just(0.0)),
    st.builds(Tick, st.just(0.0)),
    st.builds(Paused, st.booleans(), st.just(0.0)),
)
STEPS = st.sampled_from(["goes on"] * 12 + ["fails", "restarts"])
SAID = st.fixed_dictionaries(
    {
        "clients": st.sampled_from([0, 2, 3]),
        "over_selection": st.sampled_from([0.0, 0.5]),
        "train": st.sampled_from(["sampled", "all"]),
        "stall_s": st.sampled_from([0.0, 15.0]),
        "replace_after_s": st.sampled_from([-1.0, 0.0, 5.0]),
        "evaluate_every": st.sampled_from([0, 1]),
    }
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(SAID, st.lists(st.tuples(EVENTS, st.floats(0, 60), STEPS), max_size=80))
def test_any_history_keeps_the_promises(said: dict[str, object], history: list[tuple[Event, float, str]]) -> None:
    """Check that rounds count up, with a quorum; accepted updates are aggregated; an open step wakes; replays are equal."""
    m, now, aggregated = round_of(rounds=3, quorum=2, **said), 0.0, 0
    accepted: dict[tuple[str, int], set[str]] = {}

    def play(event: Event) -> None:
        nonlocal aggregated
        before = m.state.reported
        for effect in m.play(event):
            new = isinstance(effect, Acknowledge) and effect.accepted and effect.name not in before
            if new and isinstance(event, Reported):
                accepted.setdefault((event.work, event.round), set()).add(effect.name)
            if isinstance(effect, Aggregate):
                assert effect.round == m.record.round + 1
                assert len(effect.cohort) >= 2
                assert set(effect.cohort) == m.state.reported & set(m.record.cohort)
                assert accepted["train", effect.round] <= m.state.reported, "an accepted update is lost"
                if m.rules.settings.train == "sampled":
                    assert accepted["train", effect.round] == set(effect.cohort)
                aggregated += 1
                play(Aggregated(now))

    for event, span, then in history:
        now += span
        play(replace(event, now=now))
        if then == "fails":
            play(StepFailed("disk full"))
            play(Resumed(now))
        if then == "restarts":
            assert m.played_again() == m.state
            finished = m.state.finished
            inbox = finished if m.record.phase is Phase.DONE else accepted.get(m.record.open_orders, set())
            m, now = m.restarted(set(inbox), set(finished)), 0.0
            play(Resumed(now))
        assert m.record.round == aggregated <= 3
        if m.record.phase in (Phase.TRAINING, Phase.EVALUATING):
            wake = m.next_wake(now)
            assert wake is not None
            assert wake > now or wake == m.state.deadline
        assert not set(m.record.replaced) & set(m.record.devices)
        assert set(m.record.cohort) <= set(m.record.devices)
        assert m.state.awaited == msgspec.structs.replace(m.state).awaited, "not as found anew"
    assert m.played_again() == m.state


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SAID, st.lists(st.tuples(EVENTS, st.floats(0, 60)), max_size=60))
def test_after_any_history_devices_that_answer_bring_it_to_the_end(
    said: dict[str, object], history: list[tuple[Event, float]]
) -> None:
    m, now = round_of(rounds=3, quorum=2, **said), 0.0
    todo: list[Event] = []

    def play(event: Event) -> None:
        for effect in m.play(event):
            if isinstance(effect, Aggregate):
                play(Aggregated(now))
            if isinstance(effect, Open):
                todo.extend(Reported(name, effect.round, now, effect.work) for name in effect.devices)

    for event, span in history:
        now += span
        play(replace(event, now=now))
    todo.clear()
    play(Paused(False, now))
    for name in "abcdef":
        play(Connected(name, now))
    for _ in range(60):
        while todo:
            play(replace(todo.pop(), now=now))
        wake = m.next_wake(now)
        if wake is None:
            break
        now = max(now, wake)
        play(Tick(now))
    assert m.record.phase is Phase.DONE


NEWCOMERS = st.one_of(EVENTS, st.builds(Connected, st.sampled_from("wxyz"), st.just(0.0), st.just(True)), EVENTS)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(NEWCOMERS, st.floats(0, 60)), max_size=120))
def test_any_history_after_the_end_adapts_newcomers_only_and_ends(history: list[tuple[Event, float]]) -> None:
    """Check that cohorts hold only newcomers, that none gets more than its rounds, and that silence ends the adaptation."""
    m, now, given_rounds = done(), 0.0, dict[str, int]()

    def play(event: Event) -> None:
        for effect in m.play(event):
            if isinstance(effect, Open) and effect.work == "train":
                assert set(effect.devices) <= set("wxyz")
            if isinstance(effect, Aggregate):
                assert effect.cohort and set(effect.cohort) <= set("wxyz") & set(m.record.adapting)
                for name in effect.cohort:
                    given_rounds[name] = given_rounds.get(name, 0) + 1
                play(Aggregated(now))

    for event, span in history:
        now += span
        if isinstance(event, Connected):
            newcomer = event.name in "wxyz" and not given_rounds.get(event.name)
            event = Connected(event.name, now, newcomer)
        elif isinstance(event, Reported):
            work, number = m.record.open_orders
            event = Reported(event.name, number, now, work)
        else:
            event = replace(event, now=now)
        play(event)
        assert all(count <= 2 for count in given_rounds.values())
        assert m.restarted(set(m.state.reported)).state.awaited == m.state.awaited
    for _ in range(12):
        wake = m.next_wake(now)
        if wake is None:
            break
        now = max(now, wake)
        play(Tick(now))
    assert m.record.phase is Phase.DONE
    assert m.played_again() == m.state


def test_who_is_expelled_has_no_part_in_its_round_any_more() -> None:
    m = begun("abc", min_clients=3)
    m.play(Reported("a", 1, 1), Reported("b", 1, 2))
    assert m.play(Expelled("a", 3)) == []
    assert (m.record.devices, m.record.cohort, m.state.updates) == (("b", "c"), ("b", "c"), {"b"})
    assert m.play(Reported("a", 1, 4)) == [Acknowledge("a", accepted=False)]
    assert m.play(Reported("c", 1, 5)) == [Acknowledge("c", accepted=True), Aggregate(1, ("b", "c"))]
    assert m.restarted({"b", "c"}).record.cohort == ("b", "c")


def test_a_round_closes_when_the_last_one_it_waited_for_is_expelled() -> None:
    m = begun()
    m.play(Reported("a", 1, 1))
    assert m.play(Expelled("b", 2)) == [Aggregate(1, ("a",))]
    m.play(Aggregated(3))
    assert m.record.phase is Phase.WAITING


def test_nobody_waits_for_the_return_of_a_device_that_was_expelled() -> None:
    m = round_of(min_clients=1)
    m.play(Connected("a", 0), Disconnected("a", 1))
    assert m.state.left_at == {"a": 1}
    m.play(Expelled("a", 2))
    assert m.state.left_at == {}


# --- what operators are told about the sizes of changes in a masked sum


@pytest.mark.parametrize(
    ("above", "clipped", "told"),
    [
        ({"shared": (20, 20, 12, 3, 1, 0, 0)}, 3, "no number changed by more than 8"),
        ({"shared": (9, 9, 9, 9, 9, 9, 4)}, 9, "some changed by more than 16"),
        ({"shared": (0,) * 7}, 0, "no number changed by more than 0.25"),
        ({"shared": (5, 4, 3, 2, 0, 0, 0), "generated": (6, 0, 0, 0, 0, 0, 0)}, 2, "no number changed by more than 4"),
    ],
)
def test_the_operator_is_told_who_clipped_and_which_bound_would_cut_nothing(above, clipped: int, told: str) -> None:
    said = f"{clipped} of 20 devices clipped their update in round 7; privacy.secure_clip = 2, and {told}"
    assert SummedChanges(7, 20, above).told(2.0) == said
