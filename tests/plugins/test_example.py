"""The mathematics of the example's components, against numbers worked out by hand or in float64."""

import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import attune_example
import numpy as np
import pytest
import torch
from attune_example.fedadam import FIRST, SECOND, FedAdam
from attune_example.json_lines import READER
from attune_example.logit_adjusted import PRIOR, LogitAdjusted, WithPrior
from attune_example.methods import LG_FEDAVG
from attune_example.settings import FedAdamSettings, LogitAdjustedSettings, TopShareSettings, WithPriorSettings
from attune_example.top_share import TopShare
from torch import nn

import attune
from attune import plugin
from attune.common.errors import ShardError
from attune.common.exchange.transform import DeviceContext, PartUpdate
from attune.common.methods.method import assign
from attune.common.models.registry import build, default_spec
from attune.fedclient.work.objectives.base import Network
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import VALUE
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition

SETTINGS = FedAdamSettings(server_lr=0.5, beta1=0.6, beta2=0.7, adaptivity=0.25)


def test_only_the_head_travels_in_lg_fedavg() -> None:
    parts = assign(LG_FEDAVG, build(default_spec("tabular", (4,), 3, 0, "dnn", {}), seed=0))
    assert {name for name, part in parts.items() if part == "shared"} == {"head.weight", "head.bias"}
    assert set(parts.values()) == {"shared", "private"}


def test_fedadam_is_what_its_equations_say_over_three_rounds() -> None:
    draw = np.random.default_rng(0)
    x, vault = draw.normal(size=5), MemoryVault()
    aggregator = FedAdam(SETTINGS, vault, 0, {"layer": ["w", "count"]})
    aggregator.start({"w": torch.tensor(x), "count": torch.tensor(3)})
    m, v = np.zeros(5), np.full(5, 0.25**2)
    for _ in range(3):
        values = {"a": draw.normal(size=5), "b": draw.normal(size=5), "idle": np.full(5, 1e9)}
        weights = {"a": 1.0, "b": 3.0, "idle": 0.0}
        counts = {"a": 4, "b": 8, "idle": 100}
        aggregator.close_round(
            [
                PartUpdate(name, weights[name], {"w": torch.tensor(values[name]), "count": torch.tensor(counts[name])})
                for name in values
            ]
        )
        delta = (values["a"] + 3 * values["b"]) / 4 - x
        m, v = 0.6 * m + 0.4 * delta, 0.7 * v + 0.3 * delta**2
        x = x + 0.5 * m / (np.sqrt(v) + 0.25)
        for key, expected in {VALUE: x, FIRST: m, SECOND: v}.items():
            np.testing.assert_allclose(vault.read(key)["w"].numpy(), expected, rtol=1e-12)
        assert int(vault.read(VALUE)["count"]) == 7
        assert aggregator.slot("a") == aggregator.cold_start() == VALUE


@pytest.fixture
def model() -> nn.Module:
    """Return a head alone, with known logits."""
    head = nn.Linear(2, 3).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        head.bias.zero_()
    return nn.Sequential(OrderedDict(head=head))


X = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
Y = torch.tensor([0, 2])
LOG_PRIOR = [math.log(2 / 5), math.log(1 / 5), math.log(2 / 5)]  # (1, 0, 1) samples and one more of each class


def test_logit_adjusted_training_minimises_the_adjusted_loss(model: nn.Module, make_task) -> None:
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    trained = LogitAdjusted(LogitAdjustedSettings(strength=2.0)).run(make_task(model, X, Y, start))
    logits = [[1.0, 0.0, 1.0], [0.0, 2.0, 2.0]]
    losses = []
    for row, label in zip(logits, Y.tolist(), strict=True):
        adjusted = [value + 2 * prior for value, prior in zip(row, LOG_PRIOR, strict=True)]
        losses.append(math.log(sum(map(math.exp, adjusted))) - adjusted[label])
    assert trained.loss == pytest.approx(sum(losses) / 2)
    assert not trained.tensors["head.weight"].equal(start["head.weight"])


def test_the_predictor_puts_the_adjustment_back(model: nn.Module, make_task) -> None:
    predictor, network = WithPrior(WithPriorSettings(strength=2.0)), Network(model)
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    prepared = predictor.prepare(make_task(model, X, Y, start))
    assert prepared[PRIOR].tolist() == pytest.approx([2 * prior for prior in LOG_PRIOR])
    expected = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64) + 2 * torch.tensor([LOG_PRIOR], dtype=torch.float64)
    torch.testing.assert_close(predictor.logits(network, prepared, X[:1]), expected)


def test_the_names_for_packages_are_listed_once_and_can_be_imported() -> None:
    typed = re.findall(r"^    from ([\w.]+) import \w+ as (\w+)$", Path(plugin.__file__).read_text(), re.MULTILINE)
    assert sorted(plugin.__all__) == sorted(plugin.PLACES)
    assert {name: module for module, name in typed} == plugin.PLACES, "what mypy reads is what is imported"
    for name in plugin.__all__:
        assert getattr(plugin, name) is not None
    with pytest.raises(AttributeError, match="lists what packages may import"):
        plugin.Coordinator  # noqa: B018


def test_the_example_imports_no_other_module_of_attune() -> None:
    for path in Path(attune_example.__file__).parent.glob("*.py"):
        imported = re.findall(r"^from (attune\b[\w.]*)|^import (attune\b[\w.]*)", path.read_text(), re.MULTILINE)
        assert {"".join(names) for names in imported} <= {"attune.plugin"}, path.name


def test_rows_settings_and_readers_need_no_torch() -> None:
    loads = (
        "import sys, attune_example.methods, attune_example.settings, attune_example.json_lines; print('torch' in sys.modules)"
    )
    places = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", loads], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}
    )
    assert done.stdout.strip() == "False", done.stderr


def test_the_largest_changes_are_handed_in_and_the_others_next_time() -> None:
    top = TopShare("top-share", TopShareSettings(share=0.4))
    before = {"w": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]), "count": torch.tensor(3)}
    first = {"w": torch.tensor([1.5, 0.0, 1.25, 1.0, 4.0]), "count": torch.tensor(4)}

    def handed_in(tensors: dict[str, torch.Tensor], owed: dict[str, torch.Tensor], change: bool) -> tuple[dict, dict]:
        context = DeviceContext("a", "shared", 1, "", change, None if change else before, owed, lambda purpose: 0, {})
        return dict(top.on_device(PartUpdate("a", 1.0, tensors), context).tensors), context.errors

    sparse, owed = handed_in(first, {}, False)
    assert sparse["w"].tolist() == [1.0, 0.0, 1.0, 1.0, 4.0] and int(sparse["count"]) == 4
    assert owed["w"].tolist() == [0.5, 0.0, 0.25, 0.0, 0.0] and "count" not in owed
    sparse, owed = handed_in({"w": torch.tensor([0.25, 0.0, 0.5, -0.125, 0.0])}, owed, True)
    assert sparse["w"].tolist() == [0.75, 0.0, 0.75, 0.0, 0.0] and owed["w"].tolist() == [0.0, 0.0, 0.0, -0.125, 0.0]


def test_a_federation_trains_with_sparse_updates_of_lines_that_it_reads(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 4)).round(3)
    lines = [json.dumps({"x": row.tolist(), "y": "high" if row[0] > 0 else "low"}) for row in x]
    (tmp_path / "points.jsonl").write_text("\n".join(lines))
    attune.register("readers", "json-lines", READER)
    attune.register("transforms", "top-share", TopShareSettings)
    cut = partition(load_dataset(str(tmp_path / "points.jsonl")), "iid", 2, seed=0)
    shards = {name: (*cut.arrays(place, "train"), *cut.arrays(place, "test")) for place, name in enumerate(cut.names)}
    settings = {"transforms.top-share.share": 0.3, "train.lr": 0.5}
    results = [attune.simulate(shards, "fedavg", "mlr", 8, settings=of, progress=False) for of in (settings, {"train.lr": 0.5})]
    losses = [[row.loss for row in result._outcome.snapshot.rows if row.loss is not None] for result in results]
    assert losses[0][:2] == losses[1][:2] and losses[0][-1] != losses[1][-1], "the first order is the same"
    assert results[0].status["accuracy"]["over_samples"] > 0.8
    (tmp_path / "bad.jsonl").write_text('{"x": [1.0]}\n')
    with pytest.raises(ShardError, match="'y'"):
        load_dataset(str(tmp_path / "bad.jsonl"))
