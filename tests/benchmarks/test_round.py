"""The benchmarks measure what they claim: the model's size, that it travels every round, and the costs beside plain work."""

import json
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import SettingError
from attune.fedserver.home import ServerHome
from benchmarks import floor, gpu, mcsa, private_step, secure_round
from benchmarks import round as benchmark
from benchmarks.floor import floor_s
from benchmarks.model import Freight
from benchmarks.table import COLUMNS, ROWS, write
from benchmarks.tls import raw_tls_bytes_per_s


@given(parameters=st.integers(20, 5000), tensors=st.integers(2, 10), classes=st.integers(1, 5))
def test_the_model_has_the_size_asked_for(parameters, tensors, classes):
    sizes = [p.numel() for p in Freight(parameters, tensors, classes).parameters()]
    assert (sum(sizes), len(sizes), sizes[0]) == (parameters, tensors, classes)
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


def test_an_impossible_size_is_named():
    with pytest.raises(SettingError, match="5 parameters cannot be 8 tensors"):
        Freight(5, 8, 2)


def test_forward_touches_one_tensor_alone():
    model = Freight(100, 4, 2)
    torch.nn.functional.cross_entropy(model(torch.zeros(3, 1)), torch.tensor([0, 0, 1])).backward()
    assert [p.grad is not None and bool(p.grad.any()) for p in model.parameters()] == [True, False, False, False]


def test_the_command_measures_a_federation_in_which_everything_travels(monkeypatch):
    """Check in the server's database that each device moved the whole model down and up in every round."""
    moved: list[tuple[int, int]] = []
    federation = benchmark.federation

    @contextmanager
    def keep(work, *arguments):
        with federation(work, *arguments) as processes:
            yield processes
            rows = ServerHome(work / "server").snapshot().rows
            moved.extend((row.bytes_down, row.bytes_up) for row in rows if row.work == "train")

    monkeypatch.setattr(benchmark, "federation", keep)
    said = CliRunner().invoke(
        benchmark.main,
        ["--clients", "1", "--parameters", "5000", "--tensors", "3", "--rounds", "2", "--warm-up", "1", "--json"],
    )
    assert said.exit_code == 0, said.output
    found = json.loads(said.output.splitlines()[-1])
    assert found["median_s"] > 0
    assert found["p90_s"] >= found["median_s"] >= found["min_s"]
    assert found["server_idle_bytes"] > 0
    assert {"server_rss_above_idle_bytes", "clients", "parameters", "tensors", "rtt_ms", "method", "rounds", "machine"} <= set(
        found
    )
    assert len(moved) == 3
    assert all(min(pair) > 4 * 5000 for pair in moved)


def test_the_table_writes_every_row_with_its_target(tmp_path):
    found = dict.fromkeys(COLUMNS, 1) | {"machine": {"load_1_min": 0.5}, "medians_s": [1]}
    write(tmp_path, "python -m benchmarks.table", [found, found])
    whole = json.loads((tmp_path / "round.json").read_text())
    assert whole["command"] == "python -m benchmarks.table"
    assert {"date", "machine"} <= set(whole)
    assert len(whole["rows"]) == 2
    lines = (tmp_path / "round.csv").read_text().splitlines()
    assert lines[0].split(",") == list(COLUMNS)
    assert lines[1].endswith(",0.5")


def test_the_rows_are_those_that_have_targets():
    said = [(row.case.clients, row.case.parameters, row.case.tensors, row.case.rtt_ms, row.target_s) for row in ROWS]
    assert said == [
        (2, 1_000_000, 8, 0.0, 0.052),
        (8, 1_000_000, 8, 0.0, 0.15),
        (4, 25_000_000, 8, 0.0, 1.7),
        (2, 1_000_000, 150, 50.0, 0.25),
        (2, 1_000, 8, 0.0, 0.02),
    ]
    assert ROWS[2].target_bytes == 120_000_000 + 4 * 1024 * 1024


def test_the_floor_of_a_round_is_the_sum_of_its_paths_over_all_cores():
    costs = {"transport": 1e-9, "hash": 2e-9, "write": 3e-9, "read": 4e-9}
    found = floor_s(costs, 2, 1_000_000, cores=4)
    assert found == {"transport": 0.004, "hash": 0.014, "write": 0.015, "read": 0.032, "floor": 0.0163}


def test_every_path_costs_something(monkeypatch):
    monkeypatch.setattr(floor, "TOTAL_BYTES", 1 << 22)
    assert all(cost >= 0 for cost in floor.paths().values())
    assert floor.transport_per_byte() > 0


def test_raw_tls_moves_all_it_was_given():
    assert raw_tls_bytes_per_s(1 << 22) > 0


def test_a_private_step_is_compared_with_a_plain_one(monkeypatch):
    monkeypatch.setattr(private_step, "STEPS", 2)
    monkeypatch.setattr(private_step, "SAMPLES", 96)
    found = private_step.measure(private_step.CASES["MLR 64 x 10"], repeats=1)
    assert found["values"] == 64 * 10 + 10
    for way in ("clipped", "private"):
        assert found[f"{way}_ratio"] == pytest.approx(found[f"{way}_ms"] / found["plain_ms"], rel=0.05)


def test_the_ways_differ_by_clipping_and_noise(monkeypatch):
    monkeypatch.setattr(private_step, "STEPS", 3)
    monkeypatch.setattr(private_step, "SAMPLES", 96)
    tasks = private_step.ways(private_step.CASES["MLR 64 x 10"])
    trained = {name: private_step.Sgd(private_step.SgdSettings()).run(task).tensors for name, task in tasks.items()}
    again = private_step.Sgd(private_step.SgdSettings()).run(tasks["clipped"]).tensors
    moved = {
        name: float(sum((tensors[key] - tasks[name].start[key]).square().sum() for key in tensors)) ** 0.5
        for name, tensors in trained.items()
    }
    assert all(torch.equal(again[name], trained["clipped"][name]) for name in again)
    assert 0 < moved["clipped"] < moved["private"]  # noise moves weights further than clipped gradients do


def test_a_secure_round_is_compared_with_a_plain_one(monkeypatch, tmp_path):
    monkeypatch.setattr(secure_round, "ROUNDS", 2)
    cpu_s = {(1, False): 1.0, (3, False): 2.0, (1, True): 2.0, (3, True): 5.0}
    given = lambda devices, rounds, settings: cpu_s[rounds, bool(settings)]  # noqa: E731
    monkeypatch.setattr(secure_round, "cpu_s", given)
    said = CliRunner().invoke(
        secure_round.main, ["--repeats", "1", "--out", str(tmp_path / "out.json")], catch_exceptions=False
    )
    assert said.exit_code == 0, said.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["processor_s"] == {"plain": 0.5, "secure": 1.5} and found["ratio"] == 3.0


def test_both_kinds_of_round_run(monkeypatch):
    for name, value in {"DEVICES": 5, "FEATURES": 3}.items():
        monkeypatch.setattr(secure_round, name, value)
    devices = secure_round.shards()
    assert [secure_round.cpu_s(devices, 1, given) > 0 for given in secure_round.WAYS.values()] == [True, True]


def test_the_share_of_the_roof_is_that_of_the_smaller_limit(monkeypatch):
    monkeypatch.setattr(mcsa, "SQUARE", 64)
    monkeypatch.setattr(mcsa, "COPY", 1 << 12)
    monkeypatch.setattr(mcsa, "cpu_s", lambda work: (work(), 0.001)[1])  # every work takes 1 ms
    found = mcsa.measure(S=4, D=100, repeats=1)
    arithmetic, memory = 4 * 4 * 4 * 100 / (2 * 64**3 / 0.001), 12 * 4 * 100 / (8 * 4096 / 0.001)
    assert found["smaller_roof"] == ("arithmetic" if arithmetic > memory else "memory")
    assert found["share_of_roof"] == pytest.approx(max(arithmetic, memory) / 0.001, abs=0.001)
    assert found["round_beyond_mixing_by_bytes"] == 0.0


def test_the_obvious_mixing_is_the_servers():
    X_SD = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    expected = mcsa.naive(X_SD, 5.0)
    mcsa.mcsa_(X_SD, 5.0)
    torch.testing.assert_close(X_SD, expected, rtol=1e-5, atol=1e-6)


# --- round of FedTP at the published size, in small

SMALL = ("model.preset=small", "train.local_epochs=1")


def test_the_seconds_are_those_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock stand but for simulations, of which each takes 3 s and 2 s a round."""
    now_s, rounds = [0.0], []
    simulated = gpu.simulate

    def slow(*args: Any, **options: Any) -> Any:
        rounds.append(options["rounds"])
        now_s[0] += 3 + 2 * options["rounds"]
        return simulated(*args, **options)

    monkeypatch.setattr(gpu, "simulate", slow)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now_s[0])
    assert gpu.published_round("cpu", 40, 3, SMALL) == 2 and rounds == [1, 4]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main([], standalone_mode=False)
    assert "no GPU" in capsys.readouterr().out
