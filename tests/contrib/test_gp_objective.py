"""Gaussian processes: the marginal likelihood as a loss, predictions against a float64 oracle, and odd devices."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attune.common.errors import SettingError
from attune.common.seeds import derive
from attune.contrib.gp.method import GpObjectiveSettings, GpPredictorSettings
from attune.contrib.gp.objective import OMEGA, TREE, GpObjective, GpPredictor, chosen
from attune.contrib.gp.process import gibbs, log_evidence, own_covariance
from attune.fedclient.work.objectives.base import LocalTask, Network
from attune.fedclient.work.objectives.descent import Cancelled, TrainingDiverged
from attune.fedclient.work.orders import FEATURES
from attune.fedclient.work.predictors.base import LABELS
from tests.fedclient.work.predictors.test_knn import Body
from tests.fedclient.work.predictors.test_knn import task_of as of_model


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


def test_a_model_that_is_a_head_alone_is_refused():
    model = nn.Sequential(OrderedDict(head=nn.Linear(2, 3)))
    with pytest.raises(SettingError, match="no layer before its head"):
        GpObjective(GpObjectiveSettings()).extras(dict(model.state_dict()), Network(model))


def task_of(x, y, classes=10, seed=7, cancelled: Callable[[], bool] = lambda: False) -> LocalTask:
    task = of_model(Body(x.shape[-1], classes).train(), x, y, cancelled)
    return replace(task, seeds=lambda purpose: derive(seed, purpose))


def blobs(classes, each=8, seed=0):
    """Return samples around a point of its own for each class."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes).repeat_interleave(each)
    return torch.randn(len(classes), 3, generator=draw).repeat_interleave(each, 0) * 2 + 0.1 * torch.randn(
        len(y), 3, generator=draw
    ), y


def predict(gp, task, x, tensors=None):
    tensors = gp.prepare(task) if tensors is None else tensors
    task.network.model.eval()
    with torch.no_grad():
        return gp.logits(task.network, tensors, x)


def test_two_classes_against_an_oracle():
    """Expect p(class 3) = mean over chains of E sigma(f), f as in a regression on kappa / omega, by the trapezoidal rule."""
    x, y = blobs([3, 8], each=5)
    gp = GpPredictor(GpPredictorSettings(length_scale=0.8, output_scale=5.0, gibbs_draws=6))
    task = task_of(x, y)
    tensors, query = gp.prepare(task), torch.tensor([[0.3, -0.2, 0.5], [1.5, 0.0, -1.0]])
    memory, omega, sign = tensors[FEATURES].double().numpy(), tensors[OMEGA][0].double().numpy(), np.where(y == 3, 1.0, -1.0)
    assert omega.shape == (6, 10) and tensors[LABELS].equal(y) and tensors[FEATURES].equal(x)

    def kernel(a, b):
        return 5 * np.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * 3 * 0.8**2))

    own, cross = kernel(memory, memory) + 5e-6 * np.eye(10), kernel(memory, query.double().numpy())
    u = np.linspace(-9, 9, 20_001)
    expected = np.zeros(2)
    for omega_N in omega:
        A = np.linalg.inv(own + np.diag(1 / omega_N))
        mean, variance = cross.T @ A @ (sign / 2 / omega_N), 5 - np.einsum("nm,nk,km->m", cross, A, cross)
        f = mean[:, None] + np.sqrt(variance)[:, None] * u
        expected += np.trapezoid(np.exp(-u * u / 2) / np.sqrt(2 * np.pi) / (1 + np.exp(-f)), u, axis=1) / len(omega)
    found = predict(gp, task, query, tensors).exp()
    assert found[:, 3].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert found[:, 8].tolist() == pytest.approx((1 - expected).tolist(), abs=1e-5)
    assert found[:, [0, 1, 2, 4, 5, 6, 7, 9]].max() == 0


@settings(derandomize=True, deadline=None, max_examples=5)
@given(st.sets(st.integers(0, 9), min_size=2, max_size=7), st.integers(0, 1000))
def test_probabilities_over_the_classes_add_up_to_one_and_heaps_are_told_apart(classes, seed):
    x, y = blobs(sorted(classes), seed=seed)
    scores = predict(GpPredictor(GpPredictorSettings()), task_of(x, y), torch.cat([x, 50 * x]))
    assert scores.dtype == torch.float32 and scores.shape == (2 * len(x), 10)
    assert torch.allclose(scores.double().exp().sum(dim=1), torch.ones(2 * len(x), dtype=torch.float64), atol=1e-6)
    assert set(scores.argmax(dim=1).tolist()) <= classes
    assert (scores[: len(x)].argmax(dim=1) == y).float().mean() > 0.8


def test_far_from_everything_it_does_not_know():
    """Use three classes, 2 and 3 alike: half for one branch, a quarter for each class of the other."""
    x, y = torch.tensor([[0.0], [0.1], [5.0], [5.1], [6.0], [6.1]]), torch.tensor([1, 1, 2, 2, 3, 3])
    scores = predict(GpPredictor(GpPredictorSettings()), task_of(x, y), torch.full((1, 1), 1e4))
    assert scores.exp()[0, 1:4].tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-6)


def test_a_device_of_one_class_says_that_class():
    x, _ = blobs([4])
    gp, task = GpPredictor(GpPredictorSettings()), task_of(x, torch.full((8,), 4))
    tensors = gp.prepare(task)
    assert tensors[OMEGA].shape == (0, 20, 8)
    scores = predict(gp, task, -x, tensors)
    assert scores.argmax(dim=1).tolist() == [4] * 8 and scores[:, 4].tolist() == [0.0] * 8


def test_a_device_without_samples_has_the_models_own_logits():
    gp, task = GpPredictor(GpPredictorSettings()), task_of(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    tensors, query = gp.prepare(task), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert tensors.keys() == task.start.keys()
    scores = predict(gp, task, query, tensors)
    assert scores.equal(task.network.model(query))


def test_duplicates_of_both_labels_leave_it_undecided():
    x = torch.ones(12, 3)
    scores = predict(GpPredictor(GpPredictorSettings(gibbs_draws=400)), task_of(x, torch.arange(12) % 2), x[:1])
    assert scores.exp()[0, :2].tolist() == pytest.approx([0.5, 0.5], abs=0.02)


def test_every_position_of_a_sequence_is_a_point_of_memory():
    x, y = blobs([0, 1, 2], each=8)
    x, y = x.view(6, 4, 3), y.view(6, 4)
    gp, task = GpPredictor(GpPredictorSettings(memory_points=10)), task_of(x, y)
    tensors = gp.prepare(task)
    assert tensors[FEATURES].shape == (10, 3) and tensors[OMEGA].shape == (2, 20, 10)
    assert len(tensors[FEATURES].unique(dim=0)) == 10, "no point twice"
    for point, label in zip(tensors[FEATURES], tensors[LABELS], strict=True):
        assert y[(x == point).all(dim=-1)].tolist() == [label]
    scores = predict(gp, task, x, tensors)
    assert scores.shape == (6, 4, 10) and (scores.argmax(-1) == y).float().mean() > 0.8


def test_omega_is_zero_where_a_point_is_not_of_a_node():
    x, y = blobs([0, 1, 2], each=4)
    tensors = GpPredictor(GpPredictorSettings()).prepare(task_of(x, y))
    for side, omega_SP in zip(tensors[TREE], tensors[OMEGA], strict=True):
        here = side[y] != 0
        assert (omega_SP[:, here] > 0).all() and not omega_SP[:, ~here].any()
    assert (tensors[TREE] == 0).sum() == 7 + 8


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 35), st.integers(0, 99))
def test_chosen_points_have_every_class_while_there_is_room(labels, size, seed):
    at = chosen(torch.tensor(labels, dtype=torch.int64), size, torch.Generator().manual_seed(seed)).tolist()
    assert len(at) == min(size, len(labels)) and at == sorted(set(at)) and all(0 <= place < len(labels) for place in at)
    assert len({labels[place] for place in at}) == min(size, len(set(labels)))


def test_features_that_are_not_finite_are_an_error_and_so_is_the_end():
    y = torch.tensor([0, 1])
    with pytest.raises(TrainingDiverged, match=r"lower train\.lr"):
        GpPredictor(GpPredictorSettings()).prepare(task_of(torch.full((2, 3), math.nan), y))
    with pytest.raises(Cancelled):
        GpPredictor(GpPredictorSettings()).prepare(task_of(torch.zeros(2, 3), y, cancelled=lambda: True))
