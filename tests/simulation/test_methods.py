"""Methods in whole federations without the network, and the devices' results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import attune
from attune.fedclient.cli import main as fedclient
from tests.e2e.harness import digit_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write shards of two devices with two digits each."""
    return {path.name: path for path in digit_shards(tmp_path_factory.mktemp("digits"), 2)}


def test_local_sends_no_weights(shards: dict[str, Path], tmp_path: Path) -> None:
    result = attune.simulate(shards, "local", rounds=2, settings={"train.local_epochs": 1})
    assert (result.status["state"], result.status["method"], result.status["round"]) == ("done", "local", 2)
    assert result.digests == {}
    for client in result.status["clients"]:
        assert (client["bytes_up"], client["bytes_down"]) == (0, 0)
    out = result.save(tmp_path)
    assert not list(out.glob("*.safetensors"))
    assert {path.parent.name for path in out.glob("models/*/model.safetensors")} == set(shards)


def test_with_fedavg_every_device_keeps_what_all_share(shards: dict[str, Path], tmp_path: Path) -> None:
    out = attune.simulate(shards, "fedavg", rounds=1, settings={"train.local_epochs": 1}).save(tmp_path)
    common = load_file(out / "shared.safetensors")
    assert not (out / "server.safetensors").exists()
    for name in shards:
        kept = load_file(out / "models" / name / "model.safetensors")
        assert common.keys() == kept.keys()
        assert all(np.array_equal(kept[tensor], common[tensor]) for tensor in common)


def test_a_local_baseline_is_trained_compared_and_kept_if_better(shards: dict[str, Path], tmp_path: Path) -> None:
    """Train one round, after which the generated weights are useless, and those trained locally are not."""
    result = attune.simulate(shards, "fedtp", rounds=1, baseline="local", home=tmp_path)
    for client, (name, shard) in zip(result.status["clients"], shards.items(), strict=True):
        assert client["accuracy_local"] > client["accuracy"] + 0.1
        assert client["kept"] == "local"
        home = tmp_path / "devices" / name
        shown = CliRunner().invoke(fedclient, ["evaluate", "--data", str(shard), "--home", str(home), "--json"])
        found = json.loads(shown.output)
        assert (found["kept"], found["accuracy"]) == ("local", pytest.approx(client["accuracy_kept"], abs=1e-12))
        assert found["accuracy"] > client["accuracy"] + 0.1
        files = {path.name for path in (home / "model").iterdir()}
        assert files == {"model.json", "model.safetensors", "personalized.safetensors", "common.safetensors"}
