"""Models that devices keep: where federation helps and where it does not, and what sends no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import attune
from attune.fedclient.cli import main as fedclient
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.split import Partition, write_shards
from benchmarks.recipes.catalogue import get
from tests.e2e.harness import digit_shards

SETTINGS = {"model.name": "dnn", "model.hidden": [50], "train.local_epochs": 2}


@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_what_is_kept_is_about_as_good_as_the_best_of_its_models(tmp_path: Path, alpha: float) -> None:
    """Use sixty digits per device, six of them held out.

    With similar classes (alpha 10) a blend by raw likelihood lost 12 points to the common model, because the model trained
    alone is surer and right less often.
    """
    point = next(point for point in get("label-shift").points if point.x == alpha)
    kept, best = means(point.cut(load_source(DIGITS), 0), tmp_path, 20, SETTINGS)
    assert kept > best - 0.03


def test_devices_learn_from_each_other_which_model_is_of_no_use(tmp_path: Path) -> None:
    """Use twelve devices that label in six ways, so that the common model is of no use to any of them.

    Six samples held out are too few for one device to see that: by its own samples each gave it a part of the weight, which
    cost 5.3 points in the mean after the recipe's 30 rounds, and costs 3.4 after the six rounds of a small model here. With
    what the others have learned it is 0.7.
    """
    recipe = get("relatedness")
    point = next(point for point in recipe.points if point.x == 2)
    kept, best = means(
        point.cut(load_source(DIGITS), 0), tmp_path, 6, {**recipe.settings, "model.name": "dnn", "model.hidden": [50]}
    )
    assert kept > best - 0.015


def means(cut: Partition, folder: Path, rounds: int, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return mean accuracies under FedMCSA: of the kept models, and of the better of the common model and one trained alone."""
    write_shards(folder / "shards", cut)
    shards = f"{folder}/shards/*"
    result = attune.simulate(shards, "fedmcsa", None, rounds, 0, settings, baseline="local", executor="stacked", progress=False)
    clients = result.status["clients"]
    kept, common, local = (fmean(client[f"accuracy_{name}"] for client in clients) for name in ("kept", "common", "local"))
    return kept, max(common, local)


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
