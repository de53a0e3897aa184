"""The benchmarks measure what they claim: the model's size, that it travels every round, and the costs beside plain work."""

import json
from contextlib import contextmanager

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from attune.fedserver.home import ServerHome
from benchmarks import mcsa, private_step
from benchmarks import round as benchmark
from benchmarks.floor import floor_s
from benchmarks.model import Freight


@given(parameters=st.integers(20, 5000), tensors=st.integers(2, 10), classes=st.integers(1, 5))
def test_the_model_has_the_size_asked_for(parameters, tensors, classes):
    sizes = [p.numel() for p in Freight(parameters, tensors, classes).parameters()]
    assert (sum(sizes), len(sizes), sizes[0]) == (parameters, tensors, classes)
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


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


def test_the_floor_of_a_round_is_the_sum_of_its_paths_over_all_cores():
    costs = {"transport": 1e-9, "hash": 2e-9, "write": 3e-9, "read": 4e-9}
    found = floor_s(costs, 2, 1_000_000, cores=4)
    assert found == {"transport": 0.004, "hash": 0.014, "write": 0.015, "read": 0.032, "floor": 0.0163}


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
