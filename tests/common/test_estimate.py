"""Lines with the remaining time: right, none for quick work, and few for long work."""

import pytest

from attune.common.estimate import Estimate, span


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_follows_from_what_was_done():
    clock = Clock()
    estimate = Estimate(clock)
    lines = {}
    for now, share in ((0, 0.0), (6, 0.1), (8, 0.15), (10, 0.2), (12, 0.25), (14, 0.3), (46, 0.6), (60, 1.0)):
        clock.now = float(now)
        lines[now] = estimate.at("round 3", share)
    assert {now for now, line in lines.items() if line} == {10, 46}, "after three measurements, and 10 s after the first line"
    assert lines[10] == "round 3: 20%, about 32 s left", "0.1 in the 4 s from the first measurement on"
    assert lines[46] == "round 3: 60%, about 32 s left"


def test_a_slow_beginning_does_not_count():
    """A first order of 4 s, because torch is loaded, and 600 orders of 0.1 s: never more than about a minute."""
    clock = Clock()
    estimate = Estimate(clock)
    lines = []
    for order in range(1, 601):
        clock.now = 4 + 0.1 * order
        if line := estimate.at("orders", order / 600):
            lines.append(line)
    assert lines[0] == "orders: 8%, about 55 s left", lines


def test_what_is_quick_says_nothing_and_another_thing_begins_anew():
    clock = Clock()
    estimate = Estimate(clock)
    for number in range(100):
        clock.now += 4.0
        assert estimate.at(f"round {number}", 0.5) is None
    clock.now += 4.0
    assert estimate.at("round 99", 0.1) is None, "less than before: it was begun anew"


def test_an_hour_in_steps_of_a_second_says_little():
    clock = Clock()
    estimate = Estimate(clock)
    lines = []
    for second in range(3600):
        clock.now = float(second)
        lines.append(estimate.at("all", second / 3600))
    assert 5 < len([line for line in lines if line]) < 20


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (7800, "2 h 10 min")]
)
def test_spans(seconds, text):
    assert span(seconds) == text
