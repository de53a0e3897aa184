"""Predictions of Gaussian processes against a float64 oracle, and on odd devices: one class, none, duplicates, sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attune.common.config import TrainSettings
from attune.common.seeds import derive
from attune.contrib.gp.method import GpPredictorSettings
from attune.contrib.gp.predictor import OMEGA, TREE, GpPredictor, chosen
from attune.fedclient.work.objectives.base import LocalTask
from attune.fedclient.work.objectives.descent import Cancelled, TrainingDiverged
from attune.fedclient.work.objectives.memory import FEATURES, LABELS
from attune.fedclient.work.objectives.network import Network


class Body(nn.Module):
    """Model whose features are the input itself, after dropout."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Dropout(0.5)
        self.head = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def task_of(x, y, classes=10, seed=7, cancelled: Callable[[], bool] = lambda: False) -> LocalTask:
    model = Body(x.shape[-1], classes).train()
    start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return LocalTask(
        network=Network(model),
        start=start,
        received={},
        x=x,
        y=y,
        settings=TrainSettings(),
        seeds=lambda purpose: derive(seed, purpose),
        device=torch.device("cpu"),
        cancelled=cancelled,
    )


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


def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    x, y = blobs([0, 5, 6])
    one, again, other = (predict(GpPredictor(GpPredictorSettings()), task_of(x, y, seed=seed), x) for seed in (1, 1, 2))
    assert one.equal(again) and not one.equal(other)


def test_every_position_of_a_sequence_is_a_point():
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


def test_chosen_points_are_not_always_the_same():
    labels = torch.zeros(50, dtype=torch.int64)
    labels[17] = 3
    draws = [chosen(labels, 2, torch.Generator().manual_seed(seed)).tolist() for seed in range(5)]
    assert all(17 in at for at in draws), "the one sample of a rare class"
    assert len({tuple(chosen(labels, 5, torch.Generator().manual_seed(seed)).tolist()) for seed in range(5)}) == 5


def test_features_that_are_not_finite_are_an_error_and_so_is_the_end():
    y = torch.tensor([0, 1])
    with pytest.raises(TrainingDiverged, match=r"lower train\.lr"):
        GpPredictor(GpPredictorSettings()).prepare(task_of(torch.full((2, 3), math.nan), y))
    with pytest.raises(Cancelled):
        GpPredictor(GpPredictorSettings()).prepare(task_of(torch.zeros(2, 3), y, cancelled=lambda: True))
