"""The benchmarks of simulations, in small: each figure is what its name says. How fast it was is not tested."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.fedclient.cli import main as fedclient
from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks import long_simulation, many_devices, side_by_side
from benchmarks.contenders import task
from benchmarks.federation import Home
from benchmarks.stacked import CASES, Device


def written(command, arguments, out):
    """Run a benchmark's command with `--out`, and return the file that it has written."""
    said = CliRunner().invoke(command, [*map(str, arguments), "--out", str(out)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return json.loads(out.read_bytes())


# --- a whole experiment


def test_only_stacked_training_counts_as_training():
    timed, devices = long_simulation.Timed(), [Device(CASES["MLR 60 x 10"], number) for number in range(2)]
    timed.run([each.evaluation() for each in devices])
    assert timed.training_s == 0.0
    trained = timed.run([each.training() for each in devices])
    assert timed.training_s > 0.0
    plain = Stacked().run([each.training() for each in devices])
    assert [each.loss for each in trained] == [each.loss for each in plain]


def test_the_experiment_trains_all_devices_stacked(tmp_path, monkeypatch):
    def partitioned(self, program, *words):
        said = CliRunner().invoke(fedclient, [*map(str, words)], catch_exceptions=False)
        assert program == "fedclient" and said.exit_code == 0, said.output

    monkeypatch.setattr(Home, "run", partitioned)  # within this process
    run = written(long_simulation.main, ["--devices", 4, "--rounds", 2, "--every", 1, "--last", 1], tmp_path / "long.json")[
        "run"
    ]
    assert (run["devices"], run["rounds"], run["method"], run["one_by_one"]) == (4, 2, "fedmcsa", [])
    assert run["overhead_ms"] > 0


# --- many devices


def test_many_devices_train_in_small_cohorts(tmp_path, monkeypatch):
    results = []

    def kept(*given, **options):
        results.append(simulate(*given, **options))
        return results[-1]

    simulate = attune.simulate
    monkeypatch.setattr(attune, "simulate", kept)
    report = written(many_devices.main, ["--devices", 6, "--cohort", 2, "--rounds", 3], tmp_path / "many.json")
    assert report["peak_mib"] >= report["before_mib"] > 0
    assert (report["devices"], report["cohort"], report["rounds"]) == (6, 2, 3)
    trained = [row for row in results[0]._outcome.snapshot.rows if row.work == "train"]
    assert [sum(row.round == number for row in trained) for number in (1, 2, 3)] == [2, 2, 2]
    assert report["mean_accuracy"] == results[0].table().mean("accuracy")


# --- overhead


# --- beside others


@pytest.fixture
def contender(tmp_path, monkeypatch):
    """Return a function that makes a contender out of the lines of a shell script."""
    monkeypatch.setattr(side_by_side, "_reap", lambda: None)  # it would wait for other processes of these tests

    def make(*lines):
        path = tmp_path / "python"
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
        return path

    return make


def test_a_contender_is_measured_from_the_end_of_its_first_round(contender, monkeypatch, tmp_path):
    python = contender("echo round", "echo round", "echo round", """echo '{"accuracy": 0.5}'""")
    clock, processor = iter([10.0, 11.0, 14.0]), iter([3.0, 3.5, 4.0])
    monkeypatch.setattr(side_by_side, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(side_by_side, "tree_cpu_s", lambda pid: next(processor))
    result = side_by_side.measure(python, ["plain"], tmp_path / "data.npz", rounds=3)
    assert result == {"accuracy": 0.5, "wall_s": 2.0, "processor_s": 0.5}


@pytest.mark.parametrize(
    "lines", [["echo round", "echo no memory >&2", "exit 3"], ["echo round", "echo round", "echo no memory >&2"]]
)
def test_a_contender_that_fails_is_named_with_its_last_words(contender, tmp_path, lines):
    with pytest.raises(RuntimeError, match=r"(?s)benchmarks\.contenders\.plain.* of 2 rounds.*no memory"):
        side_by_side.measure(contender(*lines), ["plain"], tmp_path / "data.npz", rounds=2)


def test_the_task_of_all_contenders_can_be_learned(tmp_path):
    task.write(tmp_path / "data.npz", devices=2)
    devices = task.tensors(tmp_path / "data.npz")
    assert [tuple(map(len, device)) for device in devices] == [(150, 150, 50, 50)] * 2
    net = task.model()
    before = task.accuracy(net.state_dict(), devices)
    for round_ in range(5):
        task.train(net, *devices[0][:2], seed=round_)
    assert task.accuracy(net.state_dict(), devices) > before + 0.2
    drawn = [some.tolist() for some in task.batches(150, task.torch.Generator().manual_seed(0))]
    assert len(drawn) == task.STEPS and sorted(np.concatenate(drawn[:8]).tolist()) == list(range(150))


# --- the benchmark of stacked training: every way trains the same devices, and all cases can be stacked
