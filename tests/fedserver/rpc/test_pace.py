"""Pace of beats: that of the settings in a small fleet, slower for streams that are opened beside many others."""

from __future__ import annotations

import pytest

from attune.fedserver.rpc.service import SLOWEST_S, DevicePulses


@pytest.mark.parametrize(("others", "pace_s"), [(0, 2.0), (199, 2.0), (1_000, 10.0), (9_999, SLOWEST_S)])
def test_the_pace_of_a_new_stream_grows_with_the_open_ones(others: int, pace_s: float) -> None:
    pulses = DevicePulses(2.0)
    for number in range(others):
        pulses.open(f"d{number}", 2.0)
    assert pulses.pace("new") == pytest.approx(pace_s)


def test_beats_of_ten_thousand_idle_devices_are_about_a_thousand_a_second() -> None:
    pulses, beats_a_second = DevicePulses(2.0), 0.0
    for number in range(10_000):
        every_s = pulses.pace(f"d{number}")
        assert pulses.open(f"d{number}", every_s).every_s == pytest.approx(every_s)
        beats_a_second += 2 / every_s
    assert 900 < beats_a_second < 1100


def test_a_slow_setting_stays_and_a_device_does_not_count_itself() -> None:
    pulses = DevicePulses(120.0)
    for number in range(9_000):
        pulses.open(f"d{number}", 2.0)
    assert pulses.pace("new") == 120.0
    fleet = DevicePulses(1.0)
    for number in range(101):
        fleet.open(f"d{number}", 1.0)
    assert fleet.pace("d5") == 1.0 < fleet.pace("new")
