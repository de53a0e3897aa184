"""Weights of finished models: by hand, and the present ones are what devices keep."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch

import attune
from attune.simulation.recipes.catalogue import RecipeMethod
from benchmarks.finish_weights import ALWAYS, NOW, ORIGIN, WEIGHED, Device, devices_of, lines, rows_of
from tests.e2e.harness import tabular_shard


def test_models_that_explain_alike_have_the_weights_of_the_prior() -> None:
    """Take equal models but for the test part. Weights are 1/2 and 1/2, or 1/4 and 3/4: only then the finished one decides."""
    same = torch.full((4,), 0.5)
    test = {"personalized": torch.tensor([[0.9, 0.1]]), "finished-personalized": torch.tensor([[0.2, 0.8]])}
    device = Device(dict.fromkeys(test, same), test, torch.tensor([1]), {}, False)
    kept = {way: device.kept(way) for way in WEIGHED}
    assert [accuracy for accuracy, _ in kept.values()] == [0.0, 0.0, 0.0, 1.0]
    assert all(nats == pytest.approx(4 * torch.log(torch.tensor(0.5)).item()) for _, nats in kept.values())


def test_what_others_found_counts_for_finished_models_in_one_way_alone() -> None:
    """Give others' shares 0.9 and 0.1 to the personalized and the common model, so that weights are those of the prior.

    They are 0.45, 0.05, 0.25 and 0.25, and 0.52 for the label; with the shares of the origins 0.45, 0.05, 0.45, 0.05: 0.46.
    """
    label = {"personalized": 0.1, "common": 1.0, "finished-personalized": 0.7, "finished-common": 1.0}
    test = {name: torch.tensor([[1 - p, p]]) for name, p in label.items()}
    held_out = dict.fromkeys(label, torch.full((4,), 0.5))
    device = Device(held_out, test, torch.tensor([1]), {"personalized": 0.9, "common": 0.1}, False)
    assert (device.kept(NOW)[0], device.kept(ORIGIN)[0]) == (1.0, 0.0)


def test_a_common_model_far_behind_is_finished_in_the_other_ways_alone() -> None:
    probability = {name: torch.full((2,), 0.5) for name in ("personalized", "common", "finished-common")}
    test = {"personalized": torch.tensor([[0.6, 0.4]]), "common": torch.tensor([[0.55, 0.45]]),
            "finished-common": torch.tensor([[0.0, 1.0]])}  # fmt: skip
    device = Device(probability, test, torch.tensor([1]), {}, True)
    assert device.kept(NOW)[0] == 0.0 and device.kept(ALWAYS)[0] == 1.0


def test_the_present_weights_are_those_of_devices(tmp_path: Path) -> None:
    shards = [tabular_shard(tmp_path / f"site{n}", seed=n, samples=80) for n in range(3)]
    settings = {"train.finish": "auto", "train.local_epochs": 1, "model.name": "dnn"}
    devices = devices_of(shards, RecipeMethod("FedMCSA", "fedmcsa"), 3, 0, settings)
    assert all({"personalized", "finished-personalized", "finished-common"} <= device.held_out.keys() for device in devices)
    rows = list(rows_of({"recipe": "a-finished", "x": "1", "seed": 0, "method": "FedMCSA"}, devices))
    result = attune.simulate(shards, "fedmcsa", None, 3, 0, settings, executor="stacked", progress=False)
    assert rows[0]["kept"] == pytest.approx(100 * fmean(row.kept for row in result.table()), abs=0.01)
    table = list(lines([{name: str(value) for name, value in row.items()} for row in rows]))
    assert len(table) == 3 and table[2].startswith(f"| a | 1 | FedMCSA | 1 | {rows[0]['kept']:.1f} (")
