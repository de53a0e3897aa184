"""The preset `plain`: every method without what Attune adds to papers, and FedAvg as anybody would write it down."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import cross_entropy

import attune
from attune.common.methods.registry import names
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.fedserver.cli import cli
from attune.fedserver.core.planning import resolve
from attune.simulation.comparison_table import method_table
from attune.simulation.over_seeds import SeedResults
from tests.simulation.test_command import run, shards

EXTRAS = {
    "method.bound_change", "method.bound_samples", "train.validation", "train.clip_norm", "round.take_back",
    "round.deadline_multiple",
}  # fmt: skip
STEP: dict[str, Any] = {
    "method.preset": "plain", "model.name": "mlr", "train.local_epochs": 1, "train.batch_size": 1000, "train.momentum": 0.0,
    "train.lr": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_plain_turns_the_extras_of_every_method_off_and_changes_nothing_else(name: str) -> None:
    plain, everyday = (resolve({"method": {"name": name, "preset": preset}}).fixed() for preset in ("plain", "everyday"))
    assert plain.pop("method.preset") == "plain" and "method.preset" not in everyday
    assert plain.keys() == everyday.keys()
    assert {key for key in plain if plain[key] != everyday[key]} <= EXTRAS
    assert {plain[key] for key in EXTRAS & plain.keys()} == {0.0}
    given = resolve({"method": {"name": name, "preset": "plain"}, "train": {"clip_norm": 2.0}})
    assert given.train.clip_norm == 2.0, "what the user sets counts"


def site(seed: int, samples: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x, tested = (rng.normal(size=(n, 4)).astype(np.float32) for n in (samples, 8))
    return x, rng.integers(0, 3, samples), tested, rng.integers(0, 3, 8)


def test_plain_fedavg_is_the_mean_of_the_devices_weighted_by_their_samples() -> None:
    """Two rounds of one step of gradient descent on all samples of each device, written down with torch alone.

    One device has ten times the samples of the others: everyday use bounds its weight, and holds out a tenth of its samples.
    """
    sites = {name: site(seed, 20) for seed, name in enumerate("abc")} | {"large": site(9, 200)}
    result = attune.simulate(sites, "fedavg", rounds=2, seed=4, settings=STEP, progress=False)
    model = result.model("a")
    network = build(model.info.model, 4)
    for _ in range(2):
        served = {name: tensor.detach().clone() for name, tensor in tensors_of(network).items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in served.items()}
        for device, (x, y, *_) in sites.items():
            network.load_state_dict(served)
            network.zero_grad()
            features = result.model(device).prepared(x)  # standardised
            cross_entropy(network(features), torch.from_numpy(y)).backward()  # type: ignore[no-untyped-call]
            for name, parameter in network.named_parameters():
                total[name] += len(y) / 260 * (parameter.detach() - 0.5 * parameter.grad)
        network.load_state_dict(total)
    for name, tensor in model.tensors.items():
        torch.testing.assert_close(tensor, total[name], atol=1e-5, rtol=1e-5)
    usual = attune.simulate(sites, "fedavg", rounds=2, seed=4, settings=STEP | {"method.preset": "everyday"}, progress=False)
    assert any(not torch.allclose(usual.model("a").tensors[name], total[name], atol=1e-2) for name in total)


def test_plain_fits_no_ordinary_models_and_is_named_in_tables(tmp_path: Path) -> None:
    results = {
        preset: attune.simulate(
            {"a": site(1, 30), "b": site(2, 30)}, "fedavg", rounds=1, settings=STEP | {"method.preset": preset}
        )
        for preset in ("plain", "everyday")
    }
    plain = results["plain"].table()
    assert all(row.alone is None and row.kept == row.accuracy for row in plain)
    assert results["plain"].title == "fedavg (plain)" and results["everyday"].title == "fedavg"
    of_seeds = {name: SeedResults({0: result}) for name, result in results.items()}
    assert [row[0] for row in method_table(of_seeds).rows] == ["fedavg (plain)", "fedavg"]


def test_the_command_says_what_it_has_turned_off(tmp_path: Path) -> None:
    data, quick = shards(tmp_path / "shards"), ("--rounds", "1", "--set", "train.local_epochs=1")
    words = ["simulate", "--data", data, "--method", "fedavg,local", "--preset", "plain", *quick]
    done = CliRunner().invoke(cli, [*words, "--set", "local:train.clip_norm=1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    off = "method.bound_change (3), method.bound_samples (5), round.deadline_multiple (5), round.take_back (10), "
    off += "train.clip_norm (1), train.validation (0.1), ordinary models (--baseline)"
    assert f"fedavg (plain): off are {off}" in done.stderr
    assert "local (plain): off are round.deadline_multiple (5), round.take_back (10), train.validation (0.1)" in done.stderr
    assert "fedavg (plain)" in done.stdout
    assert "alone" not in done.stdout.splitlines()[1]
    assert "fedavg (plain)" not in "\n".join(run("--data", data, "--method", "fedavg", *quick))
    table = tmp_path / "table.csv"
    run("--data", data, "--method", "fedavg", "--preset", "plain", "--seeds", "0,1", *quick, "--table", str(table))
    assert "fedavg (plain)" in table.read_text()


def test_a_race_needs_what_plain_turns_off(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["simulate", "--data", shards(tmp_path), "--method", "auto", "--preset", "plain"])
    assert done.exit_code == 2 and "plain" in done.output and "auto" in done.output, done.output
