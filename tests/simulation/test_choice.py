"""What devices with a few dozen samples keep, where federation pays and where it does not."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import attune
from attune.fedclient.partition.datasets import DIGITS, load_source
from attune.fedclient.partition.split import write_shards
from attune.simulation.recipes.catalogue import get

SETTINGS = {"model.hidden": [50], "train.local_epochs": 2}


@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_what_is_kept_is_about_as_good_as_the_best_of_its_models(tmp_path: Path, alpha: float) -> None:
    """Sixty digits a device, six of them held out. With classes alike (alpha 10) a blend by raw likelihood lost 12 points to
    the common model, because the one trained alone is surer of itself and right less often."""
    point = next(point for point in get("label-shift").points if point.x == alpha)
    write_shards(tmp_path / "shards", point.cut(load_source(DIGITS), 0))
    shards = f"{tmp_path}/shards/*"
    result = attune.simulate(shards, "fedmcsa", "dnn", 20, 0, SETTINGS, baseline="local", executor="stacked", progress=False)
    clients = result.status["clients"]

    def mean(name: str) -> float:
        return fmean(client[name] for client in clients)

    assert mean("accuracy_kept") > max(mean("accuracy_common"), mean("accuracy_local")) - 0.03
