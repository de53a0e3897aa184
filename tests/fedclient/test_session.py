"""The session as transcripts: events, and the device's reactions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from attune.common.exchange.messages import BlobRef, Farewell, Notice, Order, Welcome
from attune.fedclient.address import backoff_s
from attune.fedclient.messages import (
    AskForModel,
    Broke,
    Displaced,
    Expired,
    Extend,
    GiveUp,
    Keep,
    Prepare,
    Reconnect,
    Refuse,
    ReportTrouble,
    Say,
    Send,
    SendRefused,
    Sent,
    Start,
    StopSending,
    StopWork,
    StreamOpened,
    WorkDone,
    WorkFailed,
    Yield,
)
from attune.fedclient.session import ASKS_FOR_MODEL, Session

ONE = Order("train-1-kiel", 1, "train", (BlobRef("shared", "ab", 10),), ("shared",))
TWO = Order("train-2-kiel", 2, "train")
LATE = "the round closed before this update arrived; waiting for the next"


def play(session, *script):
    """Feed events to the session, and compare the effects of each with the expected ones."""
    for number, (event, expected) in enumerate(script):
        assert session.on(event) == expected, f"line {number}: {event}"


def begun(finished=None):
    session = Session(finished)
    play(session, (StreamOpened(), []), (Welcome(b"plan"), [Prepare(b"plan")]))
    return session


TIMED, LONGER = replace(ONE, deadline_s=60.0), replace(ONE, deadline_s=600.0)
BROKEN = (Broke("cut", 0.0), [Say("cut (trying again)"), Reconnect(0.2)])
AGAIN = (StreamOpened(), [Say("connected again")])
DONE = (WorkDone(ONE.id), [Send(ONE.id, resume=False)])
TRANSCRIPTS = {  # of sessions that have a plan
    "a quiet life": [
        (Notice("waiting for 1 more device"), [Say("waiting for 1 more device")]),
        (ONE, [Start(ONE)]),
        DONE,
        (Sent(ONE.id, late=False), []),
        (TWO, [Start(TWO)]),
        (WorkDone(TWO.id), [Send(TWO.id, resume=False)]),
        (Sent(TWO.id, late=True), [Say(LATE)]),
        (Farewell("over"), [Keep("over")]),
        (ONE, []),
    ],
    "a stream that breaks while training does not disturb it": [
        (ONE, [Start(ONE)]),
        BROKEN,
        (Broke("refused", 0.3), [Reconnect(0.4)]),
        AGAIN,
        (Welcome(b"plan"), []),
        (ONE, []),
        DONE,
        (ONE, []),
        (Sent(ONE.id, late=False), []),
    ],
    "work that ends while there is no stream is handed in when it is asked for": [
        (ONE, [Start(ONE)]),
        BROKEN,
        (WorkDone(ONE.id), []),
        AGAIN,
        (ONE, [Send(ONE.id, resume=True)]),
    ],
    "work that ends before a new stream has asked for it waits too": [
        (ONE, [Start(ONE)]),
        BROKEN,
        AGAIN,
        (WorkDone(ONE.id), []),
        (TWO, [Start(TWO)]),
    ],
    "a break stops the sending until the server asks again": [
        (ONE, [Start(ONE)]),
        DONE,
        (Broke("cut", 0.0), [Say("cut (trying again)"), StopSending(ONE.id), Reconnect(0.2)]),
        AGAIN,
        (ONE, [Send(ONE.id, resume=True)]),
        (Sent(ONE.id, late=False), []),
    ],
    "work that fails without a stream is tried again when it is asked for": [
        (ONE, [Start(ONE)]),
        BROKEN,
        (WorkFailed(ONE.id, "no memory"), [Say("cannot carry out this order: no memory")]),
        AGAIN,
        (ONE, [Start(ONE)]),
    ],
    "a lost receipt is asked for again": [
        (ONE, [Start(ONE)]),
        DONE,
        (Sent(ONE.id, late=False), []),
        (ONE, [Send(ONE.id, resume=True)]),
    ],
    "another order replaces the work and the sending": [
        (ONE, [Start(ONE)]),
        (TWO, [StopWork(ONE.id), Start(TWO)]),
        (WorkFailed(ONE.id, "stopped"), []),
        (WorkDone(TWO.id), [Send(TWO.id, resume=False)]),
        (ONE, [StopSending(TWO.id), Start(ONE)]),
        (Sent(TWO.id, late=False), []),
    ],
    "failed work is reported and the device stays": [
        (ONE, [Start(ONE)]),
        (WorkFailed(ONE.id, "no memory"), [Say("cannot carry out this order: no memory"), ReportTrouble(ONE.id, "no memory")]),
        (ONE, [Start(ONE)]),
    ],
    "work that outlives the deadline is stopped and reported": [
        (TIMED, [Start(TIMED)]),
        (
            Expired(ONE.id),
            [
                StopWork(ONE.id),
                Say("cannot carry out this order: the deadline passed"),
                ReportTrouble(ONE.id, "the deadline passed"),
            ],
        ),
        (Expired(ONE.id), []),
        (TWO, [Start(TWO)]),
    ],
    "a repeated order has a new deadline and a late one is ignored": [
        (TIMED, [Start(TIMED)]),
        (LONGER, [Extend(LONGER)]),
        DONE,
        (Expired(ONE.id), []),
        (Sent(ONE.id, late=False), []),
    ],
    "another process that takes over ends this one": [
        (ONE, [Start(ONE)]),
        (Displaced("newer", 1.0), [StopWork(ONE.id), Yield("newer")]),
    ],
    "a device displaced once by its own stream reconnects and twice yields": [
        (Broke("cut", 0.0, 9.0), [Say("cut (trying again)"), Reconnect(0.2)]),
        AGAIN,
        (Displaced("newer", 0.1), [Say("newer (trying again)"), Reconnect(0.4)]),
        AGAIN,
        (Displaced("newer", 0.1), [Yield("newer")]),
    ],
}


@pytest.mark.parametrize("script", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
def test_a_transcript(script):
    play(begun(), *script)


def test_a_device_that_was_restarted_after_its_commit_only_hands_in():
    play(begun(finished=ONE.id), (ONE, [Send(ONE.id, resume=True)]), (Sent(ONE.id, late=False), []))


def test_work_that_was_replaced_too_late_still_counts_as_finished():
    session = begun()
    play(session, (ONE, [Start(ONE)]), (TWO, [StopWork(ONE.id), Start(TWO)]), (WorkDone(ONE.id), []))
    assert session.finished == ONE.id
    play(session, (ONE, [StopWork(TWO.id), Send(ONE.id, resume=True)]))


def test_a_refused_update_is_said_loudly_and_the_device_waits():
    session = begun()
    play(session, (ONE, [Start(ONE)]), (WorkDone(ONE.id), [Send(ONE.id, resume=False)]))
    (said,) = session.on(SendRefused(ONE.id, "norm 1e9", known=True))
    assert isinstance(said, Say)
    assert "REFUSED" in said.text
    assert "norm 1e9" in said.text
    play(session, (TWO, [Start(TWO)]))


def test_an_upload_that_is_given_up_is_told_to_the_server_which_waits_for_it():
    session = begun()
    play(session, (ONE, [Start(ONE)]), (WorkDone(ONE.id), [Send(ONE.id, resume=False)]))
    said, report = session.on(SendRefused(ONE.id, "the bytes are damaged"))
    assert isinstance(said, Say)
    assert report == ReportTrouble(ONE.id, "update refused: the bytes are damaged")


def test_the_end_stops_what_is_going_on():
    session = begun()
    session.finished = "before"
    play(session, (ONE, [Start(ONE)]), (Farewell("over"), [StopWork(ONE.id), Keep("over")]))


def test_a_device_without_state_asks_for_the_model_once_before_it_ends():
    session = begun()
    play(
        session, (ONE, [Start(ONE)]), (Farewell("over"), [StopWork(ONE.id), Say(ASKS_FOR_MODEL), AskForModel(), Reconnect(0.0)])
    )
    play(session, (Welcome(b"plan"), []), (Farewell("over"), [Keep("over")]), (Farewell("over"), []))


def test_an_order_before_the_plan_is_refused():
    assert isinstance(Session().on(ONE)[0], Refuse)


def test_another_plan_stops_the_work_and_an_order_with_an_old_id_starts_anew():
    session = begun()
    play(session, (ONE, [Start(ONE)]), (Welcome(b"another"), [StopWork(ONE.id), Prepare(b"another")]))
    assert session.on(ONE) == [Start(ONE)], "an order of the last run with the same id is another one"


def test_one_that_stays_keeps_each_runs_model_once_and_never_gives_up():
    session = Session(connect_timeout_s=5.0, stay=True)
    play(session, (Welcome(b"plan"), [Prepare(b"plan")]))
    session.finished = "before"
    play(
        session,
        (Farewell("over"), [Keep("over")]),
        (Broke("gone", 100.0, 9.0), [Say("gone (trying again)"), Reconnect(0.2)]),
        (Welcome(b"plan"), []),
        (Farewell("over"), []),
        (Welcome(b"next"), [Prepare(b"next")]),
        (Broke("gone", 100.0, 9.0), [GiveUp("gone")]),
    )


def test_it_gives_up_after_the_connect_timeout_and_tries_once_more_at_its_end():
    session = Session(connect_timeout_s=5.0)
    play(
        session,
        (Broke("nobody", 0.0), [Say("nobody (trying again)"), Reconnect(0.2)]),
        (Broke("nobody", 4.9), [Reconnect(pytest.approx(0.1))]),
        (Broke("nobody", 5.0), [GiveUp("nobody")]),
    )


def test_the_back_off_starts_anew_after_a_stream_that_lived():
    session = Session()
    for _ in range(6):
        session.on(Broke("cut", 0.0, lived_s=0.1))
    assert session.on(Broke("cut", 0.0, lived_s=0.1)) == [Reconnect(10.0)]
    assert session.on(Broke("cut", 0.0, lived_s=60.0)) == [Reconnect(0.2)]


def test_the_back_off_doubles_up_to_ten_seconds():
    assert [backoff_s(n) for n in (1, 2, 3, 6, 7, 5000)] == [0.2, 0.4, 0.8, 6.4, 10.0, 10.0]


orders = st.integers(1, 4).map(lambda n: Order(f"train-{n}-kiel", n, "train"))
events = st.one_of(
    st.just(StreamOpened()),
    orders,
    st.builds(Broke, st.just("cut"), st.just(0.0)),
    st.builds(WorkDone, orders.map(lambda order: order.id)),
    st.builds(WorkFailed, orders.map(lambda order: order.id), st.just("why")),
    st.builds(Sent, orders.map(lambda order: order.id), st.booleans()),
    st.builds(SendRefused, orders.map(lambda order: order.id), st.just("why")),
)


@given(st.lists(events, max_size=40))
def test_one_thing_at_a_time_whatever_happens(script):
    session = begun()
    running: str | None = None  # order that the effects have started and not stopped
    for event in script:
        ended = isinstance(event, WorkDone | WorkFailed | Sent | SendRefused) and event.order_id == running
        doing_before = (session.working, session.sending)
        for effect in session.on(event):
            match effect:
                case StopWork(order_id) | StopSending(order_id):
                    assert order_id == running
                    running = None
                case Start(order):
                    assert running is None or ended
                    assert order.id != session.finished
                    running = order.id
                case Send(order_id):
                    assert order_id == session.finished
                    running = order_id
        assert not (session.working and session.sending), doing_before
        running = session.working or session.sending


def test_a_stream_that_lasted_is_replaced_by_another_process_however_it_began():
    play(
        begun(),
        (Broke("cut", 0.0, 9.0), [Say("cut (trying again)"), Reconnect(0.2)]),
        (StreamOpened(), [Say("connected again")]),
    )
    session = begun()
    session.on(Broke("cut", 0.0, 9.0))
    assert session.on(Displaced("newer", 60.0)) == [Yield("newer")]
