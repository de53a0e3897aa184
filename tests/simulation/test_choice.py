"""Models that devices with a few dozen samples keep, where federation helps and where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import attune
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.split import Partition, write_shards
from attune.simulation.recipes.catalogue import get

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
