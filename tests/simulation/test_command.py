"""`fedserver simulate`: attached from outside, it compares methods in a table, and writes files."""

import importlib
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError
from attune.fedserver.cli import cli
from tests import forked
from tests.e2e.harness import tabular_shard


def shards(folder: Path) -> str:
    for n in range(3):
        tabular_shard(folder / f"site{n}", seed=n, samples=24 + n)
    return str(folder / "*")


def run(*words: str) -> list[str]:
    done = CliRunner().invoke(cli, ["simulate", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_home_is_gone_on_with(tmp_path: Path) -> None:
    words = ("--data", shards(tmp_path / "shards"), "--method", "fedavg", "--rounds", "1", "--home", str(tmp_path / "home"))
    assert run(*words) == run(*words)
    assert (tmp_path / "home" / "fedavg" / "server" / "state.sqlite").exists()


def test_mistakes_are_one_line_with_the_exit_code_of_their_kind(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("fedserver")), "simulate", "--data", shards(tmp_path / "shards")]
    done = forked.run([*command, "--method", "fedavgg"], os.environ, 60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("fedserver: unknown method 'fedavgg'")


OWN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

CALLS = []


def network(spec):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.shape[0], spec.classes))


def train(model, data, context):
    CALLS.append(len(data.x))
    optimizer = torch.optim.SGD(context.parameters(), lr=context.settings.lr)
    for x, y in data.batches(8):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())
"""


def test_a_projects_own_model_and_loop_have_seeds_a_grid_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clinic.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    data, table = shards(tmp_path / "shards"), tmp_path / "methods.tex"
    own = ("--model", "clinic:network", "--hooks", "clinic", "--rounds", "1")
    lines = run(
        "--data", data, "--method", "fedavg,local", *own, "--seeds", "1,2", "--grid", "train.lr=0.01,0.1", "--table", str(table)
    )
    clinic = importlib.import_module("clinic")
    # Two methods, three devices, one order: two trials of the grid, and two seeds.
    assert len(clinic.CALLS) == 2 * 3 * (2 + 2)
    assert lines[0] == "model: clinic:network, for all methods" and "fedavg" in table.read_text()
    clinic.CALLS.clear()
    [mean] = [
        line.split() for line in run("--data", data, "--method", "fedavg", *own, "--seed", "1") if line.startswith("mean")
    ]
    expected = attune.simulate(data, "fedavg", "clinic:network", rounds=1, seed=1, train=clinic.train, progress=False).table()
    assert mean[1] == f"{expected.mean('kept'):.3f}" and len(clinic.CALLS) == 2 * 3
    wrong = CliRunner().invoke(cli, ["simulate", "--data", data, "--hooks", "nobody_has_this"])
    assert isinstance(wrong.exception, SettingError) and "of --hooks cannot be imported" in str(wrong.exception)


def test_the_command_takes_an_executor(tmp_path: Path) -> None:
    words = ("--data", shards(tmp_path / "shards"), "--method", "fedavg", "--rounds", "1", "--set", "train.local_epochs=1")
    run(*words, "--executor", "stacked", "--home", str(tmp_path / "home"))
    assert b'"stacked"' in (tmp_path / "home" / "fedavg" / "simulation.json").read_bytes()
