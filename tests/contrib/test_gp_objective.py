"""The marginal likelihood as a loss: the tensors that it trains, those that it does not, and devices with nothing to learn."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from attune.common.errors import SettingError
from attune.common.seeds import derive
from attune.contrib.gp.method import GpObjectiveSettings
from attune.contrib.gp.objective import GpObjective
from attune.contrib.gp.process import gibbs, log_evidence, own_covariance
from attune.fedclient.work.objectives.network import Network


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(2, 4), act=nn.Tanh(), head=nn.Linear(4, 3))).double()


def data(labels):
    x = torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x, torch.tensor(labels)


@pytest.fixture
def make(make_task):
    def task(labels, model=None, **options):
        model = model or model_of()
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return make_task(model, *data(labels), start, **options)

    return task


def test_the_body_learns_and_the_head_takes_no_part_not_even_in_its_decay(make):
    task = make([0, 1, 0, 1, 1, 0, 2, 2, 1], momentum=0.9, weight_decay=0.1, local_epochs=15, lr=0.1)
    trained = GpObjective(GpObjectiveSettings()).run(task)
    first = GpObjective(GpObjectiveSettings()).run(make([0, 1, 0, 1, 1, 0, 2, 2, 1], lr=0.1))
    assert trained.loss < first.loss - 0.05
    assert all(trained.tensors[name].equal(task.start[name]) for name in ("head.weight", "head.bias"))
    assert not trained.tensors["body.weight"].equal(task.start["body.weight"])


@pytest.mark.parametrize("labels", [[1, 1, 1], [2]])
def test_a_device_of_one_class_has_nothing_to_learn(make, labels):
    task = make(labels)
    trained = GpObjective(GpObjectiveSettings()).run(task)
    assert trained.loss == 0 and all(trained.tensors[name].equal(tensor) for name, tensor in task.start.items())


def test_batches_without_some_class_count_the_nodes_that_have_points(make):
    """Take one sample per step: only the root, for the class that is divided off first. Each K is 8, whatever the features."""
    task = make([0, 0, 1, 2], batch_size=1)
    trained = GpObjective(GpObjectiveSettings()).run(task)
    assert trained.loss > 0
    for name, tensor in task.start.items():
        assert torch.allclose(trained.tensors[name], tensor, atol=1e-12), "a single point says nothing about features"


def test_a_large_batch_is_cut_at_random(make):
    labels = [0, 1] * 10
    whole, part = make(labels), make(labels)
    few = GpObjective(GpObjectiveSettings(batch_points=4)).run(part)
    assert few.loss != GpObjective(GpObjectiveSettings()).run(whole).loss
    assert few.loss == GpObjective(GpObjectiveSettings(batch_points=4)).run(make(labels)).loss
    generator = torch.Generator().manual_seed(derive(7, "gibbs"))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(derive(7, "batches")))
    kept = order[torch.randperm(20, generator=generator)[:4]]
    features = part.network.with_features(part.start, part.x[kept])[1].detach()
    sign = 1.0 - 2 * part.y[kept].double()
    K = own_covariance(GpObjectiveSettings(), features)
    expected = -log_evidence(K, gibbs(GpObjectiveSettings(), K, sign, generator), sign).mean() / 4
    assert few.loss == pytest.approx(float(expected), rel=1e-12)


def test_every_position_of_a_sequence_is_a_point(make_task):
    model = model_of()
    x, y = data([0, 1, 1, 0, 2, 1])
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained = GpObjective(GpObjectiveSettings()).run(make_task(model, x.view(2, 3, 2), y.view(2, 3), start))
    assert trained.loss > 0 and not trained.tensors["body.weight"].equal(start["body.weight"])


def test_a_model_that_is_a_head_alone_is_refused():
    model = nn.Sequential(OrderedDict(head=nn.Linear(2, 3)))
    with pytest.raises(SettingError, match="no layer before its head"):
        GpObjective(GpObjectiveSettings()).extras(dict(model.state_dict()), Network(model))
