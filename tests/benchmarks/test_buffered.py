"""Accuracy against time: the speeds of the devices, the curves over seeds, and when a curve reaches an accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition, write_shards
from benchmarks import buffered
from benchmarks.result_file import Results


def test_speeds_are_a_pareto_law_cut_off_at_the_slowest():
    seconds = np.array(list(buffered.speeds([str(number) for number in range(20_000)], seed=0).values()))
    assert seconds.min() >= 1.0 and seconds.max() <= buffered.SLOWEST
    for at in (2.0, 5.0, 10.0):  # P(X > x) = (1/x - 1/20) / (1 - 1/20)
        assert (seconds > at).mean() == pytest.approx((1 / at - 1 / 20) / (1 - 1 / 20), abs=0.01)


def test_an_accuracy_is_reached_on_the_line_between_two_points():
    points = [(10.0, 0.4), (20.0, 0.6), (40.0, 0.7)]
    assert buffered.reaches(points, 0.5) == pytest.approx(15.0)
    assert buffered.reaches(points, 0.65) == pytest.approx(30.0)
    assert buffered.reaches(points, 0.4) == buffered.reaches(points, 0.1) == 10.0
    assert buffered.reaches(points, 0.71) is None


def test_a_point_is_the_mean_of_all_seeds_or_none():
    def row(mode, rounds, seed, seconds, accuracy):
        same = {"method": "fedtp", "mode": mode, "rounds": str(rounds), "seed": str(seed)}
        return same | {"seconds": str(seconds), "accuracy": str(accuracy)}

    rows = [row("buffered", 40, seed, 10.0 + seed, 0.5 + seed / 10) for seed in (0, 1)]
    rows += [row("buffered", 20, 0, 5.0, 0.3), row("synchronous", 40, 1, 99.0, 0.9)]
    assert buffered.curves(rows, "fedtp", "buffered") == [(10.5, pytest.approx(0.55))]


def test_a_run_is_written_once_with_the_clocks_time(tmp_path, monkeypatch):
    shards = write_shards(tmp_path / "shards", partition(load_dataset("digits"), "dirichlet", 4, 0, alpha=1.0))
    monkeypatch.setitem(buffered.SMALL, "train.local_steps", 1)
    monkeypatch.setitem(buffered.MODES, "buffered", ({"round.mode": "buffered", "round.buffer": 2}, (1,)))
    results = Results(tmp_path / "buffered.csv", buffered.COLUMNS)
    for _ in range(2):
        buffered.measure(results, shards, "fedavg", "synchronous", 1, 0)
    buffered.measure(results, shards, "fedavg", "buffered", 1, 0)
    synchronous, early = results.rows()
    slowest = max(buffered.speeds([shard.name for shard in shards], 0).values())
    assert float(synchronous["seconds"]) == pytest.approx(slowest, abs=0.01)  # the round waits for the slowest device
    assert float(early["seconds"]) < float(synchronous["seconds"])
    assert 0 <= float(synchronous["slow_half"]) <= 1 and 0 <= float(synchronous["accuracy"]) <= 1
