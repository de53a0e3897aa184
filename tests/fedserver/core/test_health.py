"""Health: devices' losses or troubles take the last round back; decided without tensors."""

import msgspec
import pytest

from attune.common.config import RoundSettings
from attune.fedserver.core.messages import (
    Aggregate,
    Aggregated,
    Connected,
    Excused,
    GoBack,
    Open,
    Phase,
    Record,
    Reported,
    Resumed,
)
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.policy import Synchronous, heard_as, often_taken_back
from attune.fedserver.core.round import step
from attune.fedserver.core.state import Round

NAMES = ("a", "b", "c", "d", "e")


class Play:
    """Federation of five devices. `losses` closes a training with these losses, and returns its last effects."""

    def __init__(self, **said: object) -> None:
        typed = msgspec.convert({"rounds": 9, "min_clients": 5, "evaluate_each_last": 0, **said}, RoundSettings)
        self.rules, self.state, self.unix = Rules(typed, Synchronous(typed, 0)), Round(), 0.0
        for name in NAMES:
            self.last = self(Connected(name, 0))

    def __call__(self, event):
        taken = step(self.rules, self.state, event, self.unix)
        self.state = taken.state
        return taken.effects

    @property
    def record(self) -> Record:
        return self.state.record

    def losses(self, *losses):
        for name, loss in zip(NAMES, losses, strict=True):
            effects = self(Reported(name, self.record.round + 1, 1, loss=loss))
        return effects

    def closed(self, *losses):
        """Close a round whose updates are accepted."""
        assert isinstance(self.losses(*losses)[-1], Aggregate)
        return self(Aggregated(2))


def after_a_round(**said: object) -> Play:
    m = Play(**said)
    m.closed(2.0, 2.1, 2.2, 2.0, 2.3)
    return m


def test_exploded_losses_take_the_round_before_back_and_say_so() -> None:
    m = after_a_round()
    [_, back] = m.losses(30.0, 25.0, 40.0, 22.0, 1e300)
    assert isinstance(back, GoBack)
    assert back.round == 2
    assert "after round 1 was taken back" in back.why and "2.1 to 30" in back.why
    assert m.record.phase is Phase.AGGREGATING
    effects = m(Aggregated(3, back.why))
    assert effects == (Open("train", 3, NAMES),)
    assert m.record.setback == f"round 2: {back.why}"
    assert m.record.last_cohort == () and m.record.loss == 2.1
    assert isinstance(m.losses(30.0, 25.0, 40.0, 22.0, 1e300)[-1], Aggregate), "of the state before that nothing is kept"


def test_a_minority_s_losses_and_troubles_decide_nothing() -> None:
    m = after_a_round()
    m.closed(1e300, 1e300, 1.9, 1.9, 1.9)
    for name in "ab":
        m(Excused(name, 1, troubled=True))
    assert m.record.phase is Phase.TRAINING


def test_most_devices_that_cannot_work_with_the_state_take_it_back_at_once() -> None:
    """A refused update, such as that of c, is no trouble of the state."""
    m = after_a_round()
    for name in "abc":
        m(Excused(name, 1, troubled=name != "c"))
    assert m.record.phase is Phase.TRAINING
    [back] = m(Excused("e", 1, troubled=True))
    assert isinstance(back, GoBack)
    assert "3 of 5 devices could not work with it" in back.why


@pytest.mark.parametrize("said", [{"take_back": 0.0}, {"take_back": 100.0}])
def test_the_multiple_is_a_setting(said: dict[str, float]) -> None:
    m = after_a_round(**said)
    assert isinstance(m.losses(30.0, 25.0, 40.0, 22.0, 1e300)[-1], Aggregate)


def test_a_loss_near_nothing_may_grow_manyfold() -> None:
    m = Play()
    m.closed(0.001, 0.001, 0.001, 0.001, 0.001)
    m.closed(0.5, 0.5, 0.5, 0.5, 0.5)


def test_a_restart_in_between_goes_back_all_the_same() -> None:
    m = after_a_round()
    [_, back] = m.losses(30.0, 25.0, 40.0, 22.0, 50.0)
    m.state = Round.of(m.record, NAMES)
    assert m(Resumed(9)) == (back,)


def test_a_restart_during_training_knows_the_losses_again() -> None:
    m = after_a_round()
    for name in "abcd":
        m(Reported(name, 2, 1, loss=30.0))
    m.state = Round.of(m.record, "abcd", losses=dict.fromkeys("abcd", 30.0))
    for event in (Resumed(5), Connected("e", 5)):
        m(event)
    effects = m(Reported("e", 2, 6, loss=1.0))
    assert isinstance(effects[-1], GoBack)


def test_a_state_that_could_not_be_made_counts_as_a_round_without_updates() -> None:
    m = Play()
    m.losses(2.0, 2.1, 2.2, 2.0, 2.3)
    assert m(Aggregated(2, "x would not be finite")) == (Open("train", 2, NAMES),)
    assert m.record.setback == "round 1: x would not be finite"
    assert m.record.loss is None and m.record.earlier == ()


def test_most_devices_that_cannot_evaluate_the_end_take_it_back_too() -> None:
    m = after_a_round(rounds=2)
    m.closed(1.0, 1.0, 1.0, 1.0, 1.0)
    assert m.record.phase is Phase.EVALUATING
    for name in "abc":
        m(Excused(name, 1, troubled=True))
    for name in "de":
        effects = m(Reported(name, 2, 2, "evaluate"))
    assert isinstance(effects[-1], GoBack)
    m(Aggregated(3, effects[-1].why))
    assert (m.record.phase, m.record.round) == (Phase.EVALUATING, 3)
    for name in NAMES:
        m(Reported(name, 3, 4, "evaluate"))
    assert m.record.phase is Phase.DONE


def test_the_state_is_taken_back_three_times_in_fifty_rounds_at_most() -> None:
    """Three liars of five devices report a loss of 1e9 in every round, or that they cannot work with any state."""
    m = Play(rounds=1000)
    backs: list[int] = []
    while m.record.round < 200:
        m.unix += 600.0
        m.closed(2.0, 2.1, 2.2, 2.0, 2.3) if not backs or m.record.earlier else None
        before = m.record.round
        effects = m.losses(2.0, 2.0, 1e9, 1e9, 1e9)
        if isinstance(effects[-1], GoBack):
            backs.append(before + 1)
            m(Aggregated(3, effects[-1].why))
        else:
            m(Aggregated(3))
        m.state = m.state.noting(loss=2.0)
    assert len(backs) > 3
    assert all(later - first > 49 for first, later in zip(backs, backs[3:], strict=False))
    assert "3 times within 50 rounds" in often_taken_back(Record(round=10, taken_back=(3, 5, 7)), 0.0)
    assert often_taken_back(Record(round=60, taken_back=(3, 5, 7)), 0.0) == ""


def test_the_state_is_taken_back_three_times_in_an_hour_at_most() -> None:
    """Rounds of a tenth of a second: three of five devices say after each round that they cannot work with the state."""
    m = Play(rounds=100_000)
    backs: list[float] = []
    while m.unix < 2 * 3600.0:
        m.unix += 1.0 if m.record.round < 400 else 60.0
        effects: tuple[object, ...] = ()
        for name in "abc":
            effects = m(Excused(name, 1, troubled=True)) or effects
        if effects and isinstance(effects[-1], GoBack):
            backs.append(m.unix)
            m(Aggregated(3, effects[-1].why))
        else:
            m.closed(2.0, 2.0, 2.0, 2.0, 2.0)
    assert 6 <= len(backs) <= 9
    assert all(later - first >= 3600.0 for first, later in zip(backs, backs[3:], strict=False))
    assert "within an hour" in often_taken_back(Record(round=90, taken_back_at=(0.0, 3.0, 9.0)), 60.0)
    assert often_taken_back(Record(round=90, taken_back_at=(0.0, 3.0, 9.0)), 3601.0) == ""


def gone_back(m: Play, *losses: float) -> GoBack:
    back = m.losses(*losses)[-1]
    assert isinstance(back, GoBack)
    m(Aggregated(3, back.why))
    return back


def test_the_newest_state_with_a_better_loss_becomes_the_state_again() -> None:
    """Losses grow fivefold in each round: none is ten times the one before."""
    m = Play()
    for loss in (2.0, 2.0, 10.0):
        m.closed(*[loss] * 5)
    back = gone_back(m, *[50.0] * 5)
    assert (back.round, back.to) == (4, 1), "the losses of the states after rounds 0 and 1 were 2"
    assert "after round 3 was taken back, to that after round 1" in back.why and "from 2 to 50" in back.why
    assert [state.round for state in m.record.earlier] == [0]
    assert (m.record.given_up_after, m.record.given_up) == (1, 3), "evaluations of these states do not count"


def test_captured_rounds_that_report_good_losses_are_taken_back_step_by_step() -> None:
    m = after_a_round()
    m.closed(1.0, 1.0, 1.0, 9e5, 9e5)  # of the poisoned state after round 1
    m.closed(1.0, 1.0, 1.0, 9e5, 9e5)
    targets = [gone_back(m, *[9e5] * 5).to for _ in range(3)]
    assert targets == [2, 1, 0]
    m.closed(2.0, 2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("most", [1, 3, 5])
def test_so_many_states_are_kept_as_the_setting_says(most: int) -> None:
    m = Play(rounds=99, keep_states=most)
    for closed in range(1, 9):
        m.closed(2.0, 2.0, 2.0, 2.0, 2.0)
        assert [state.round for state in m.record.earlier] == list(range(max(0, closed - most), closed))
    assert m.record.oldest_kept == 8 - most
    assert Record(round=7).oldest_kept == 7


def test_the_state_that_an_open_buffered_order_began_from_is_kept() -> None:
    record = Record(round=7, begun={"ada": 5, "bob": 8})  # of round 5, so it began from the state after round 4
    assert record.oldest_kept == 4


def test_a_state_that_is_not_finite_leaves_the_earlier_ones() -> None:
    m = after_a_round()
    m.losses(2.0, 2.1, 2.2, 2.0, 2.3)
    m(Aggregated(2, "x would not be finite"))
    assert [state.round for state in m.record.earlier] == [0]


def test_the_record_of_an_earlier_version_goes_on() -> None:
    old = msgspec.json.decode(b'{"round": 4, "loss": 2.0, "kept": true, "given_up": 3}', type=Record)
    assert (old.earlier, old.given_up_after, old.oldest_kept) == ((), 2, 4)


@pytest.mark.parametrize(("clients", "attackers", "opens"), [(3, 0.3, False), (7, 0.3, True), (0, 0.3, True), (3, 0.0, True)])
def test_a_cohort_that_the_stated_share_could_outvote_is_not_opened(clients: int, attackers: float, opens: bool) -> None:
    typed = msgspec.convert({"min_clients": 3, "clients": clients, "attackers": attackers}, RoundSettings)
    policy, state = Synchronous(typed, 0), Round(connected=frozenset("abcdefghij"))
    assert policy.opens(state) is opens
    assert bool(policy.refuses(state)) is not opens
    if not opens:
        assert "3 hostile devices of 10 can be half of a round of 3; 7 (round.clients) outvote them" in policy.refuses(state)


@pytest.mark.parametrize(("bound", "text"), [(3.0, "can count as 12"), (1.5, "can count as 6"), (1.0, ""), (0.0, "")])
def test_liars_count_as_many_devices_as_the_bound_lets_them(bound: float, text: str) -> None:
    said = heard_as(20, bound)
    assert said.startswith("4 hostile of 20 devices " + text if text else "") and bool(said) == bool(text)
