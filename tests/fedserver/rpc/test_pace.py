"""Beats: the pace of the settings, a slower one in a large fleet, and one task that looks after all streams."""

import math

import pytest

from attune.common.errors import Unreachable
from attune.common.exchange.messages import Beat
from attune.common.plan import Profile
from attune.fedserver.federation.streams import Stream
from attune.fedserver.rpc.pulses import CHANGE, SLOWEST_S, TURNS, DevicePulses, WatchedStream

PROFILE = Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5)


def opened(pulses: DevicePulses, name: str, every_s: float = 2.0, left_s: float = math.inf) -> WatchedStream:
    return pulses.open(Stream(name, PROFILE), every_s, lambda: left_s)


def sent(watched: WatchedStream) -> list[float]:
    """Return the paces of the beats that wait to be written, and take them away."""
    messages, watched.stream._unsent = watched.stream._unsent, []
    assert all(isinstance(message, Beat) for message in messages)
    return [message.every_s for message in messages if isinstance(message, Beat)]


def turn(pulses: DevicePulses, seconds: float) -> None:
    for _ in range(round(seconds * TURNS / pulses.every_s)):
        pulses.turn()


@pytest.mark.parametrize(("others", "pace_s"), [(0, 2.0), (199, 2.0), (1_000, 10.0), (9_999, SLOWEST_S)])
def test_the_pace_of_a_new_stream_grows_with_the_open_ones(others: int, pace_s: float) -> None:
    pulses = DevicePulses(2.0)
    for number in range(others):
        opened(pulses, f"d{number}")
    assert pulses.pace("new") == pytest.approx(pace_s)


def test_a_slow_setting_stays_and_a_device_does_not_count_itself() -> None:
    pulses = DevicePulses(120.0)
    for number in range(9_000):
        opened(pulses, f"d{number}")
    assert pulses.pace("new") == 120.0
    fleet = DevicePulses(1.0)
    for number in range(101):
        opened(fleet, f"d{number}", 1.0)
    assert fleet.pace("d5") == 1.0 < fleet.pace("new")


def test_beats_of_ten_thousand_idle_devices_are_few_hundred_a_second() -> None:
    """Let them enter while the fleet is small, with its fast pace; once they have accepted the slow one, count a minute."""
    pulses = DevicePulses(2.0)
    fleet = [opened(pulses, f"d{number}", pulses.pace(f"d{number}")) for number in range(10_000)]
    counts = []
    for _ in range(2):
        counts.append(0)
        for _ in range(60 * TURNS // 2):
            due = pulses._due.get(pulses._turn + 1, ())
            pulses.turn()
            for watched in due:
                (pace_s,) = sent(watched)
                watched.pulse.heard()
                watched.heard(Beat(pace_s))
                counts[-1] += 1
    assert counts[1] / 60 == pytest.approx(10_000 * 2 / SLOWEST_S, rel=0.05)
    assert all(SLOWEST_S / CHANGE <= watched.pulse.every_s <= SLOWEST_S for watched in fleet)


def test_an_older_device_keeps_the_pace_of_its_first_beat() -> None:
    pulses = DevicePulses(2.0)
    older = opened(pulses, "older")
    for number in range(1_000):
        opened(pulses, f"d{number}", 10.0)
    for _ in range(10):
        turn(pulses, 1.0)
        assert len(sent(older)) == 1  # as often as it expects them
        older.pulse.heard()
        older.heard(Beat(2.0))  # it repeats what it has heard first
    assert older.pulse.every_s == 2.0 and not older.stream.closed


def test_a_fleet_that_shrinks_gets_the_fast_pace_back() -> None:
    pulses = DevicePulses(2.0)
    others = [opened(pulses, f"d{number}", 40.0) for number in range(4_000)]
    last = opened(pulses, "last", 40.0)
    last.heard(Beat(40.0))
    for watched in others:
        watched.stream.close()
        pulses.close(watched)
    turn(pulses, 20.0)
    assert sent(last) == [2.0]
    turn(pulses, 12.0)
    assert not last.stream.closed, "its answer may be under way: it has twice the pace that it knows"
    assert sent(last)
    last.pulse.heard()
    last.heard(Beat(2.0))
    turn(pulses, 4.0)
    assert not last.stream.closed
    turn(pulses, 2.0)
    assert last.stream.closed


@pytest.mark.parametrize("pace_s", [2.0, 10.0])
def test_a_silent_device_is_gone_after_twice_the_pace(pace_s: float) -> None:
    pulses = DevicePulses(2.0)
    watched = opened(pulses, "kiel", pace_s)
    watched.heard(Beat(pace_s))
    watched.offered_s = pace_s
    pulses._pace = lambda others: pace_s  # type: ignore[method-assign]
    turn(pulses, 2 * pace_s)
    assert not watched.stream.closed
    turn(pulses, pace_s / 2)
    assert isinstance(watched.stream._error, Unreachable)


def test_a_device_that_never_beats_is_not_watched_and_one_that_transfers_has_longer() -> None:
    pulses = DevicePulses(2.0)
    older, busy = opened(pulses, "older"), opened(pulses, "busy")
    busy.heard(Beat(2.0))
    with pulses.of("busy").transfer():
        turn(pulses, 28.0)
        assert not busy.stream.closed
        turn(pulses, 4.0)
        assert busy.stream.closed
    assert not older.stream.closed


def test_a_stream_is_looked_at_when_its_certificate_is_over() -> None:
    pulses = DevicePulses(2.0)
    watched = opened(pulses, "kiel", 60.0, left_s=5.0)
    turn(pulses, 4.5)
    assert not sent(watched)
    turn(pulses, 0.5)
    assert len(sent(watched)) == 1  # and whoever writes it sees the time


def test_an_accepted_pace_is_one_that_was_offered() -> None:
    pulses = DevicePulses(2.0)
    watched = opened(pulses, "kiel")
    watched.heard(Beat(3_600.0))
    assert watched.pulse.every_s == 2.0
