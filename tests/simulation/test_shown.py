"""Progress of a simulation for people, and its table as a DataFrame."""

import io
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typing_extensions import Self

import attune
from attune.simulation import progress
from tests.simulation.test_simulate import CLOUDS, QUICK


class Frame:
    """As much of pandas.DataFrame as a table needs."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]

    def drop(self, columns: str) -> Self:
        return type(self)([{key: value for key, value in row.items() if key != columns} for row in self.rows])

    def set_index(self, column: str) -> dict[str, dict[str, Any]]:
        return {row.pop(column): row for row in self.rows}


def test_a_table_becomes_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    table = attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, baseline="local").table()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    frame = table.to_pandas()
    assert list(frame) == list(CLOUDS)
    for row in table:
        found = frame[row.device]
        assert row.interval == (found["low"], found["high"]) and found["low"] < row.accuracy < found["high"]
        assert (found["local"], found["verdict"]) == (row.local, row.verdict) and "interval" not in found


def test_a_bar_counts_orders_and_estimates_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    monkeypatch.setattr(progress, "DRAWN_EVERY_S", 0.0)
    bar = progress.ProgressBar()
    bar.begin(10)
    for _ in range(4):
        now += 2.0
        bar.order_done()
    seen = io.StringIO()
    Console(file=seen, width=100).print(bar._bar.get_renderable())
    bar.end()
    assert seen.getvalue().split()[-4:] == ["4/10", "0:00:08", "left", "0:00:12"], "six of two seconds are left"


def test_a_simulation_draws_the_bar_to_its_end_on_a_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK | {"round.evaluate_every": 1}, progress=True)
    assert "12/12" in capsys.readouterr().err
