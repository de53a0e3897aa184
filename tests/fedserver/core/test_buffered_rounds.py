"""Buffered rounds as pure decisions: orders that outlive rounds, the order of arrivals, staleness, and restarts."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.config import RoundSettings
from attune.fedserver.core.buffered_rounds import BufferedRounds, closing_round, staleness_weight
from attune.fedserver.core.messages import (
    Acknowledge,
    Aggregate,
    Aggregated,
    Connected,
    DiscardStale,
    Disconnected,
    Effect,
    Event,
    Excused,
    Expelled,
    FinishDevices,
    GoBack,
    Open,
    Paused,
    Phase,
    Record,
    Reported,
    Resumed,
    StepFailed,
    Tick,
)
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.round import left_s, next_wake, step
from attune.fedserver.core.state import Round


class Fleet:
    """Devices and server of a buffered run: each device holds the newest order that it was sent."""

    def __init__(self, names: str = "abcd", **said: Any) -> None:
        values = {"mode": "buffered", "buffer": 2, "rounds": 9, "min_clients": 2, "deadline_s": 100.0, "grace_s": 10.0} | said
        typed = msgspec.convert({"evaluate_each_last": 0, "take_back": 0.0, **values}, RoundSettings)
        self.rules = Rules(typed, BufferedRounds(typed, 0))
        self.state, self.now = Round(), 0.0
        self.orders: dict[str, tuple[str, int]] = {}
        self.inbox: dict[tuple[str, int], float] = {}  # what a restart finds: accepted and not yet aggregated
        self.aggregated: list[list[tuple[str, int]]] = []
        self.effects: list[Effect] = []
        self.play(Resumed(0.0), *(Connected(name, 0.0) for name in names))

    @property
    def record(self) -> Record:
        return self.state.record

    def play(self, *events: Event) -> list[Effect]:
        happened: list[Effect] = []
        for event in events:
            taken = step(self.rules, self.state, event)
            self.state = taken.state
            for effect in taken.effects:
                if isinstance(effect, Open):
                    self.orders.update(dict.fromkeys(effect.devices, (effect.work, effect.round)))
                elif isinstance(effect, FinishDevices):
                    for name in effect.devices:
                        self.orders.pop(name, None)
            happened += taken.effects
        self.effects += happened
        return happened

    def hand_in(self, name: str, loss: float | None = None) -> bool:
        """Hand in the order that the device holds; return whether it counts."""
        work, number = self.orders[name]
        if work == "train":
            self.inbox.setdefault((name, number), loss or 0.0)
        effects = self.play(Reported(name, number, self.now, work, loss))  # type: ignore[arg-type]
        accepted = Acknowledge(name, accepted=True) in effects
        if not accepted and work == "train":
            self.inbox.pop((name, number), None)
        return accepted

    def hand_in_all(self, names: str, loss: float | None = None) -> None:
        """Hand in what these devices hold, and close the round if that fills its buffer."""
        for name in names:
            self.hand_in(name, loss)
        self.close()

    def close(self) -> bool:
        """Aggregate, if the server is about to; return whether it was."""
        if self.record.phase is not Phase.AGGREGATING:
            return False
        record = self.record
        closing = [(name, record.begun[name]) for name in record.arrived if name in record.cohort]
        self.aggregated.append([] if record.spoiled else closing)
        self.play(Aggregated(self.now))
        for entry in closing:
            self.inbox.pop(entry, None)
        return True

    def restart(self) -> None:
        """Kill the server, and start it from its record and its inbox."""
        record = msgspec.json.decode(msgspec.json.encode(self.record), type=Record)
        here = [name for name in record.arrived if (name, record.begun[name]) in self.inbox]
        late = sorted(name for name, number in self.inbox if record.begun.get(name) == number and name not in here)
        record = msgspec.structs.replace(record, arrived=(*here, *late))
        connected = self.state.connected
        self.state = Round.of(record, record.arrived)
        self.play(Resumed(self.now), *(Connected(name, self.now) for name in sorted(connected)))


def test_a_slow_update_counts_in_a_later_round() -> None:
    fleet = Fleet("abc")
    assert fleet.orders == dict.fromkeys("abc", ("train", 1))
    for name in "ab":
        assert fleet.hand_in(name)
    assert fleet.close() and fleet.record.round == 1
    assert fleet.orders == {"a": ("train", 2), "b": ("train", 2), "c": ("train", 1)}
    assert fleet.hand_in("c") and fleet.hand_in("a") and fleet.close()
    assert fleet.aggregated == [[("a", 1), ("b", 1)], [("c", 1), ("a", 2)]], "in the order of arrival"
    assert fleet.orders["c"] == ("train", 3) == fleet.orders["a"]


def test_a_device_trains_from_each_state_once() -> None:
    fleet = Fleet("abc", buffer=2)
    fleet.hand_in("a")
    assert fleet.orders["a"] == ("train", 1) and not any(isinstance(effect, Open) for effect in fleet.effects[3:])
    fleet.hand_in("b")
    fleet.close()
    assert [effect for effect in fleet.effects if isinstance(effect, Open)][-1] == Open("train", 2, ("a", "b"))


def test_who_trains_slowly_owes_nothing_for_no_round_waits_for_it() -> None:
    fleet = Fleet("abcd", buffer=4, deadline_s=1000.0)
    for seconds, name in enumerate("abc", 1):
        fleet.now = float(seconds)
        fleet.hand_in(name)
    fleet.now = 900.0
    fleet.hand_in("d")
    assert fleet.record.phase is Phase.AGGREGATING and fleet.record.cohort == tuple("abcd")
    assert fleet.rules.policy.slow(fleet.state) == {}


def test_the_record_has_the_order_of_arrivals() -> None:
    fleet = Fleet("abcd", buffer=2)
    fleet.hand_in("d")
    assert fleet.record.arrived == ("d",)
    fleet.hand_in("b")
    assert fleet.record.phase is Phase.AGGREGATING
    assert fleet.hand_in("a"), "while the round is aggregated, an update waits for the next one"
    assert fleet.hand_in("c")
    fleet.close()
    assert fleet.aggregated == [[("d", 1), ("b", 1)]] and fleet.record.cohort == ("a", "c")
    assert fleet.record.phase is Phase.AGGREGATING, "the next buffer was full at once"


def test_what_is_too_stale_is_discarded() -> None:
    fleet = Fleet("abc", buffer=2, max_staleness=1)
    for _ in range(2):
        fleet.hand_in_all("ab")
    begun = len(fleet.effects)
    assert not fleet.hand_in("c")
    assert DiscardStale("c", 2) in fleet.effects[begun:] and fleet.record.discarded == 1
    assert fleet.orders["c"] == ("train", 3) and fleet.hand_in("c")


def test_the_weight_is_that_of_the_paper() -> None:
    assert [staleness_weight(s, 0.5) for s in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])


def test_sending_again_is_answered_accepted_before_and_after_the_round() -> None:
    fleet = Fleet("abc")
    fleet.hand_in("c")
    fleet.hand_in("a")
    again = Reported("c", 1, 0.0)
    assert Acknowledge("c", accepted=True) in fleet.play(again)
    fleet.close()
    assert Acknowledge("c", accepted=True) in fleet.play(again) and fleet.record.arrived == ()


def test_a_free_place_goes_to_an_idle_device() -> None:
    fleet = Fleet("abcdef", clients=3, buffer=3)
    first = dict(fleet.orders)
    assert len(first) == 3
    fleet.hand_in(min(first))
    assert len(fleet.orders) == 4, "the one that has handed in has trained from this state already"
    assert len(fleet.state.training) == 3


def test_the_deadline_closes_a_round_with_a_quorum() -> None:
    fleet = Fleet("abc", buffer=3)
    fleet.hand_in("a")
    fleet.hand_in("b")
    assert left_s(fleet.rules, fleet.state, 50.0) == 100, "an order has its whole time, whenever it was sent"
    assert next_wake(fleet.rules, fleet.state, 50.0) == 100
    fleet.now = 100.0
    fleet.play(Tick(100.0))
    assert fleet.record.phase is Phase.AGGREGATING and fleet.record.cohort == ("a", "b")


def test_orders_run_out() -> None:
    fleet = Fleet("abc", buffer=2, deadline_s=100.0)
    for now in (60.0, 120.0, 180.0, 240.0):
        fleet.now = now
        fleet.play(Tick(now))
        fleet.hand_in_all("ab")
    assert "c" not in fleet.record.begun and fleet.state.missed["train"]["c"].in_row == 2
    assert not fleet.hand_in("c") and fleet.record.begun["c"] == 5, "it works: it is asked again"


def test_a_device_that_fails_is_asked_again_in_the_next_round() -> None:
    fleet = Fleet("abc")
    fleet.play(Excused("c", 0.0, troubled=True))
    assert fleet.orders["c"] == ("train", 1)
    fleet.hand_in_all("ab")
    assert fleet.orders["c"] == ("train", 2)


def test_if_all_fail_they_are_asked_again_at_the_deadline() -> None:
    fleet = Fleet("ab", buffer=2)
    fleet.play(*(Excused(name, 0.0) for name in "ab"))
    assert fleet.record.phase is Phase.TRAINING
    opened = fleet.play(Tick(100.0))
    assert Open("train", 1, ("a", "b")) in opened


def test_who_comes_back_gets_its_old_order() -> None:
    fleet = Fleet("abc")
    fleet.play(Disconnected("c", 0.0))
    fleet.hand_in_all("ab")
    assert fleet.play(Connected("c", 1.0)) == [Open("train", 1, ("c",))]
    assert fleet.play(Connected("d", 2.0, newcomer=True)) == [Open("train", 2, ("d",))]


def test_who_comes_back_during_aggregation_waits() -> None:
    fleet = Fleet("abc")
    fleet.play(Disconnected("c", 0.0))
    fleet.hand_in("a")
    fleet.hand_in("b")
    assert fleet.play(Connected("c", 1.0)) == [], "nothing can be served from a state that is being made"
    fleet.close()
    assert Open("train", 1, ("c",)) in fleet.effects


def test_who_is_gone_is_waited_for_through_its_grace() -> None:
    fleet = Fleet("abc", buffer=3)
    fleet.play(Disconnected("c", 0.0))
    fleet.hand_in("a")
    fleet.hand_in("b")
    fleet.play(Tick(9.0))
    assert fleet.record.phase is Phase.TRAINING
    fleet.now = 10.0
    fleet.play(Tick(10.0))
    assert fleet.record.cohort == ("a", "b") and fleet.close()
    fleet.play(Connected("c", 11.0))
    assert fleet.hand_in("c"), "its update is not lost"


def test_a_revoked_device_takes_its_update_along() -> None:
    fleet = Fleet("abc", buffer=3)
    fleet.hand_in("c")
    fleet.play(Expelled("c", 0.0))
    assert "c" not in fleet.record.begun and fleet.record.arrived == ()
    fleet.hand_in("a")
    fleet.hand_in("b")
    assert fleet.record.cohort == ("a", "b")


def test_evaluations_beside_training() -> None:
    fleet = Fleet("abc", rounds=2, evaluate_every=1)
    fleet.hand_in_all("ab")
    assert fleet.record.phase is Phase.EVALUATING and fleet.record.devices == ("a", "b")
    assert fleet.hand_in("c"), "training goes on beside the evaluation"
    for name in "ab":
        assert fleet.hand_in(name)
    assert fleet.record.phase is Phase.TRAINING and fleet.record.arrived == ("c",)
    assert fleet.hand_in("a")
    assert not fleet.hand_in("b"), "no further round would take it in"
    fleet.close()
    assert fleet.record.devices == ("a", "b", "c") and fleet.record.begun == {}
    assert fleet.orders == dict.fromkeys("abc", ("evaluate", 2))
    for name in "abc":
        assert fleet.hand_in(name)
    assert fleet.record.phase is Phase.DONE


def test_a_slow_device_is_called_to_the_last_evaluation() -> None:
    fleet = Fleet("abc", rounds=1)
    fleet.hand_in_all("ab")
    assert fleet.orders["c"] == ("evaluate", 1)


def test_taking_the_state_back_withdraws_all_orders() -> None:
    fleet = Fleet("abc", take_back=10.0)
    for loss in (1.0, 1.0, 500.0):
        for name in "ab":
            fleet.hand_in(name, loss)
        going_back = [effect for effect in fleet.effects if isinstance(effect, GoBack)]
        fleet.close()
    assert going_back and fleet.record.round == 3 and fleet.aggregated[-1] == []
    assert fleet.orders == dict.fromkeys("abc", ("train", 4)), "what began from the spoiled state is worth nothing"


def test_a_pause_sends_no_orders_and_keeps_what_comes_in() -> None:
    fleet = Fleet("abc")
    fleet.play(Paused(on=True, now=0.0))
    fleet.hand_in_all("ab")
    assert fleet.record.phase is Phase.WAITING and fleet.hand_in("c")
    opened = fleet.play(Paused(on=False, now=1.0))
    assert Open("train", 2, ("a", "b")) in opened and fleet.record.arrived == ("c",)


def test_a_failed_step_keeps_the_buffer() -> None:
    fleet = Fleet("abc")
    fleet.hand_in("a")
    fleet.hand_in("b")
    fleet.play(StepFailed("no room"))
    assert fleet.hand_in("c")
    fleet.restart()
    assert fleet.record.phase is Phase.AGGREGATING and fleet.record.cohort == ("a", "b")
    assert isinstance(fleet.effects[-1], Aggregate) and fleet.record.arrived == ("a", "b", "c")


def test_newcomers_after_the_end_have_synchronous_rounds() -> None:
    fleet = Fleet("ab", rounds=1, adapt_rounds=2, buffer=2)
    for _ in range(2):
        fleet.hand_in_all("ab")
    assert fleet.record.phase is Phase.DONE
    fleet.play(Connected("n", 5.0, newcomer=True))
    for _ in range(2):
        assert fleet.record.adapting and fleet.hand_in("n") and fleet.close()
    assert fleet.hand_in("n") and fleet.record.phase is Phase.DONE and fleet.record.round == 3


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["hand in", "hand in", "hand in", "again", "close", "close", "drop", "return", "restart", "excuse", "time"]
        ),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(1, 4), st.integers(0, 2), st.booleans(), st.sampled_from([0, 3]))
def test_any_order_of_arrivals_drops_and_restarts(
    actions: list[tuple[str, int]], buffer: int, max_staleness: int, evaluates: bool, clients: int
) -> None:
    fleet = Fleet("abcde", buffer=buffer, max_staleness=max_staleness, rounds=6, evaluate_every=int(evaluates), clients=clients)
    accepted: set[tuple[str, int]] = set()
    handed_in: list[tuple[str, int]] = []
    versions = [0]
    for action, k in actions:
        name = "abcde"[k]
        connected = name in fleet.state.connected
        if action == "hand in" and connected and name in fleet.orders:
            work, number = fleet.orders[name]
            closing = closing_round(fleet.record)
            if fleet.hand_in(name) and work == "train":
                assert (name, number) in accepted or not 0 < max_staleness < closing - number, "it is discarded"
                accepted.add((name, number))
                handed_in.append((name, number))
        elif action == "again" and handed_in and (again := handed_in[k % len(handed_in)])[0] in fleet.state.connected:
            fleet.play(Reported(*again, fleet.now))
        elif action == "close":
            fleet.close()
        elif action == "drop":
            fleet.play(Disconnected(name, fleet.now))
        elif action == "return" and not connected:
            fleet.play(Connected(name, fleet.now))
        elif action == "restart":
            fleet.restart()
        elif action == "excuse":
            fleet.play(Excused(name, fleet.now))
        elif action == "time":
            fleet.now += 15.0 * k
            fleet.play(Tick(fleet.now))
        versions.append(fleet.record.round)
        counted = [entry for closed in fleet.aggregated for entry in closed]
        assert len(counted) == len(set(counted)), "no update counts twice"
        assert all(len(closed) <= buffer and len({name for name, _ in closed}) == len(closed) for closed in fleet.aggregated)
        waiting = {(name, fleet.record.begun[name]) for name in fleet.record.arrived}
        assert accepted == set(counted) | waiting, "no update that was accepted is lost"
        assert all(begun - 1 <= closing for closing, closed in enumerate(fleet.aggregated) for _, begun in closed)
    assert versions == sorted(versions)
