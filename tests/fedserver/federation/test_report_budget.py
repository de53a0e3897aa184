"""Budget of what a device makes the server write: within a minute, and in the minute after."""

from __future__ import annotations

import logging

import pytest

from attune.fedserver.federation.refusals import BYTES_A_MINUTE, LINE_BYTES, ReportBudget

LONG = "x" * (1000 - LINE_BYTES)  # a report that counts 1,000 bytes


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_device_above_its_budget_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fedserver")
    budget, within = ReportBudget(), BYTES_A_MINUTE // 1000
    written = [budget.allows("eve", LONG, number * 0.1) for number in range(within + 7)]
    assert written == [True] * within + [False] * 7
    assert len(said(caplog)) == 1 and "eve reports more than" in said(caplog)[0], "one line for all that is left out"
    assert budget.allows("ada", LONG, 20.0), "another device has a budget of its own"
    assert budget.allows("ada", "short", 60.0)
    assert said(caplog)[1:] == ["eve: 7 reports were left out"]
    assert budget.allows("eve", LONG, 61.0), "the next minute is another one"
