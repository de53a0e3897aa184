"""Trials of executors: a row for each with a time, a recommendation, and only those that are possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import attune
from attune.simulation import simulate
from attune.simulation.simulate import ExecutorTiming, Trial
from tests.simulation.test_command import run, shards
from tests.simulation.test_simulate import CLOUDS, QUICK


def test_the_fastest_is_recommended() -> None:
    found = Trial(
        [
            ExecutorTiming("sequential", 2.0, True),
            ExecutorTiming("stacked", 0.5, False, ("it drops units",)),
            ExecutorTiming("processes", 1.0, True),
        ]
    )
    assert found.recommended == "stacked"
    assert repr(found).splitlines() == [
        "executor       a round   speed  results",
        "sequential         2 s   1.0 x  the bits of the network",
        "stacked          0.5 s   4.0 x  the same to rounding",
        "processes          1 s   2.0 x  the bits of the network",
        "stacked: some work went one by one: it drops units",
        "recommended: executor='stacked'",
    ]


@pytest.mark.parametrize("sampled", [{}, {"round.clients": 2}])
def test_a_round_is_from_the_end_of_the_one_before_to_its_own_end(
    sampled: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a clock that ticks once for each answer: a round takes as many seconds as its cohort has devices."""
    ticks = iter(range(1000))
    monkeypatch.setattr(simulate.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(simulate, "TRIED", ("sequential",))
    found = attune.try_executors(CLOUDS, "fedavg", settings=QUICK | sampled | {"round.evaluate_every": 1})
    assert [row.round_s for row in found.rows] == [sampled.get("round.clients", 3)]


def test_a_module_is_not_tried_where_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_measure", lambda executor, *arguments: ExecutorTiming(executor, 1.0, True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    assert [row.executor for row in attune.try_executors(CLOUDS, "fedavg", model).rows] == ["sequential", "stacked"]
    assert [row.executor for row in attune.try_executors(CLOUDS, "fedavg", "mlr").rows] == list(simulate.TRIED)


def test_the_command_prints_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "TRIED", ("sequential", "stacked"))
    lines = run("--data", shards(tmp_path), "--method", "fedavg", "--set", "train.local_epochs=1", "--try-executors")
    assert [line.split()[0] for line in lines] == ["executor", "sequential", "stacked", "recommended:"]


def test_the_command_takes_an_executor(tmp_path: Path) -> None:
    words = ("--data", shards(tmp_path / "shards"), "--method", "fedavg", "--rounds", "1", "--set", "train.local_epochs=1")
    run(*words, "--executor", "stacked", "--home", str(tmp_path / "home"))
    assert b'"stacked"' in (tmp_path / "home" / "fedavg" / "simulation.json").read_bytes()
