"""Lines with the remaining time: right, none for quick work, and few for long work."""

from __future__ import annotations

import pytest

from attune.common.estimate import Estimate, span, with_estimate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_follows_from_what_was_done():
    """Expect 18 s for three quarters after a quarter in 6 s, and 40 s after a half in 40 s."""
    clock = Clock()
    estimate = Estimate(clock)
    assert estimate.at("round 3", 0.0) is None
    clock.now = 6.0
    assert estimate.at("round 3", 0.25) == "round 3: 25%, about 18 s left"
    clock.now = 8.0
    assert estimate.at("round 3", 0.3) is None, "the next line comes 10 s after the first"
    clock.now = 40.0
    assert estimate.at("round 3", 0.5) == "round 3: 50%, about 40 s left"
    assert estimate.at("round 3", 1.0) is None


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


def test_items_pass_through_untouched():
    said = []
    assert list(with_estimate("abc", "letters", said.append)) == ["a", "b", "c"]
    assert said == []
    assert list(with_estimate([], "nothing")) == []
