"""The mathematics of the example's components, against numbers worked out by hand or in float64."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from attune_example.fedadam import FIRST, SECOND, FedAdam
from attune_example.logit_adjusted import PRIOR, LogitAdjusted, WithPrior
from attune_example.methods import LG_FEDAVG
from attune_example.settings import FedAdamSettings, LogitAdjustedSettings, WithPriorSettings
from torch import nn

from attune.common.methods.method import assign
from attune.common.models.registry import build, default_spec
from attune.fedclient.work.objectives.base import Network
from attune.fedserver.lab.aggregators.base import MemoryVault, PartUpdate
from attune.fedserver.lab.aggregators.mean import VALUE

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
