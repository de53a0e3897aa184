"""The benchmarks of simulations, in small: each figure is what its name says. How fast it was is not tested."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import attune
import benchmarks.stacked
from attune.fedclient.cli import main as fedclient
from attune.fedclient.work.executor import alone
from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks import beside_revision, long_simulation, many_devices, side_by_side, simulation_overhead, spread
from benchmarks.contenders import task
from benchmarks.federation import Home
from benchmarks.stacked import CASES, Device, measure


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


def test_the_overhead_is_what_is_beyond_training(tmp_path, monkeypatch):
    seconds = iter([10.0, 14.0])  # of the process, before and after
    monkeypatch.setattr(long_simulation.time, "process_time", lambda: next(seconds))
    monkeypatch.setattr(long_simulation.attune, "simulate", lambda *a, **k: SimpleNamespace(one_by_one=[]))
    monkeypatch.setattr(long_simulation.Timed, "__init__", lambda self: setattr(self, "training_s", 1.0))
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    found = long_simulation.measure(tmp_path, "fedmcsa", rounds=10, every=5, last=2)
    assert found["processor_s"] == 4.0 and found["training_s"] == 1.0 and found["devices"] == 3
    assert found["overhead_ms"] == 1000 * 3.0 / (3 * 10)


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


def test_alone_the_trainers_do_the_work_of_a_round(monkeypatch):
    monkeypatch.setattr(simulation_overhead, "DEVICES", 2)
    monkeypatch.setattr(simulation_overhead, "ROUNDS", 1)
    shards = simulation_overhead.data()
    ready = simulation_overhead.learners(shards)
    assert [len(learner.data.train_x) for learner in ready] == [150, 150]
    assert simulation_overhead.alone(ready) > 0
    assert simulation_overhead.counted(shards, "fedavg", "mlr", 1)["training"] > 100  # of 20 steps


def test_a_simulated_round_is_the_difference_of_two_runs(monkeypatch):
    clock = [0.0]

    def simulate(*given, **options):
        clock[0] += 5.0 + 2.0 * given[3]  # a start, and so much for each round

    monkeypatch.setattr(simulation_overhead.attune, "simulate", simulate)
    monkeypatch.setattr(simulation_overhead.time, "process_time", lambda: clock[0])
    assert simulation_overhead.simulated({}, "fedavg", "stacked") == 2.0


def test_an_order_costs_the_time_between_the_first_round_and_the_last(monkeypatch):
    stamps = iter(float(number) for number in range(spread.ROUNDS * spread.DEVICES))
    now = [0.0]

    def simulate(*given, progress, **options):
        for stamp in stamps:
            now[0] = stamp
            progress(0.0)

    monkeypatch.setattr(spread.attune, "simulate", simulate)
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    monkeypatch.setattr(spread, "time", clock)
    monkeypatch.setattr(spread, "tree_cpu_s", lambda pid: now[0] / 4)
    assert spread.measure("sequential", 1000) == {"wall_s": 1.0, "driver_s": 0.5, "processor_s": 0.25}


# --- beside others


def test_a_revision_is_compared_by_its_time_beyond_training():
    then = {"processor_s": 9.0, "training_s": 1.0, "devices": 4, "rounds": 20}
    found = beside_revision._beyond_training({"then": then, "now": then | {"processor_s": 5.0}})
    assert found == {"then_ms": 100.0, "now_ms": 50.0, "ratio": 0.5}
    many = {"processor_s": 8.0, "devices": 4, "rounds": 20}  # no training of its own: the whole time of a device
    assert beside_revision._beyond_training({"then": many, "now": many})["now_ms"] == 2000.0


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


def test_a_contender_without_an_environment_is_left_out(tmp_path):
    found = side_by_side.commands({"fedjax": tmp_path / "python"})
    assert found["fedjax"] == (tmp_path / "python", ["fedjax_jit"])
    assert "flower" not in found and found["attune, stacked"][1] == ["ours", "stacked"]


@pytest.mark.parametrize(("name", "rounds"), [("linear", 5), ("cnn", 20)])
def test_the_task_of_all_contenders_can_be_learned(tmp_path, name, rounds):
    task.write(tmp_path / "data.npz", 2, task.SHAPES[name])
    devices = task.tensors(tmp_path / "data.npz")
    assert [tuple(map(len, device)) for device in devices] == [(150, 150, 50, 50)] * 2
    net = task.model(devices[0][0].shape[1:])
    before = task.accuracy(net.state_dict(), devices)
    for round_ in range(rounds):
        task.train(net, *devices[0][:2], seed=round_)
    assert task.accuracy(net.state_dict(), devices) > before + 0.2
    drawn = [some.tolist() for some in task.batches(150, task.torch.Generator().manual_seed(0))]
    assert len(drawn) == task.STEPS and sorted(np.concatenate(drawn[:8]).tolist()) == list(range(150))


# --- the benchmark of stacked training: every way trains the same devices, and all cases can be stacked


@pytest.mark.parametrize("name", CASES)
def test_both_ways_come_to_the_same(name, monkeypatch):
    monkeypatch.setattr(benchmarks.stacked, "STEPS", 5)
    made, stacked = [Device(CASES[name], number) for number in range(2)], Stacked()
    for each, found in zip(made, stacked.run([each.training() for each in made]), strict=True):
        torch.testing.assert_close(found.tensors, alone(each.training()).tensors, rtol=1e-3, atol=1e-4)
    assert stacked.reasons == []


def test_a_case_has_its_figures():
    found = measure(CASES["MLR 60 x 10"], devices=3, repeats=1)
    assert found["weights"] == 610 and found["devices"] == 3
    assert found["train_times_faster"] == pytest.approx(found["train_one_by_one_s"] / found["train_stacked_s"], rel=0.1)
