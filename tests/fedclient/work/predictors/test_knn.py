"""kNN interpolation by hand, against a float64 oracle, and the two searches for neighbours against each other."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.methods.method import configure
from attune.common.methods.registry import get
from attune.common.methods.settings.objectives import KnnSettings
from attune.common.seeds import derive
from attune.fedclient.work.build import predictor_for
from attune.fedclient.work.objectives.base import LocalTask, Network
from attune.fedclient.work.objectives.descent import Cancelled
from attune.fedclient.work.orders import FEATURES
from attune.fedclient.work.predictors import base
from attune.fedclient.work.predictors import knn as subject
from attune.fedclient.work.predictors.base import LABELS
from attune.fedclient.work.predictors.knn import Knn, library, nearest, nearest_faiss, nearest_torch, votes


def task_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, cancelled: Callable[[], bool] = lambda: False) -> LocalTask:
    start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return LocalTask(
        network=Network(model),
        start=start,
        received={},
        x=x,
        y=y,
        settings=TrainSettings(),
        seeds=lambda purpose: derive(7, purpose),
        device=torch.device("cpu"),
        cancelled=cancelled,
    )


class Body(nn.Module):
    """Model whose features are the input itself, after dropout; the head is linear without bias."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Dropout(0.5)
        self.head = nn.Linear(features, classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.fixture(params=["torch", "faiss"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Search with faiss, if it is installed, and without."""
    if request.param == "faiss" and library() is None:
        pytest.skip("faiss is not installed: pip install 'attune-fl[knn]'")
    if request.param == "torch":
        monkeypatch.setattr(subject, "library", lambda: None)
    return str(request.param)


def test_by_hand(way):
    """Use d^2 = 0 and 2 ln 3 from the query to the two nearest of three samples: exp(-d^2 / 2) is 1 and 1/3.

    So the neighbours say 3/4 for label 0 and 1/4 for label 1. The head is zero, so the model says 1/2 each.
    """
    model = Body(2, 2).train()
    nn.init.zeros_(model.head.weight)
    x = torch.tensor([[0.0, 0.0], [math.sqrt(2 * math.log(3)), 0.0], [9.0, 9.0]])
    knn = Knn(KnnSettings(neighbours=2, knn_weight=0.6))
    tensors = knn.prepare(task_of(model, x, torch.tensor([0, 1, 1])))
    with torch.no_grad():
        logits = knn.logits(Network(model), tensors, torch.zeros(1, 2))
    assert logits.exp().flatten().tolist() == pytest.approx([0.6 * 0.75 + 0.4 * 0.5, 0.6 * 0.25 + 0.4 * 0.5])


def oracle(memory: list[list[float]], labels: list[int], query: list[float], k: int, classes: int) -> list[float]:
    ranked = sorted((math.dist(row, query) ** 2, label) for row, label in zip(memory, labels, strict=True))[:k]
    similar = [(math.exp((ranked[0][0] - square) / len(query)), label) for square, label in ranked]
    total = math.fsum(value for value, _ in similar)
    return [math.fsum(value for value, label in similar if label == c) / total for c in range(classes)]


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_votes_equal_the_oracle(way, scale):
    draw = torch.Generator().manual_seed(1)
    memory_ND = 5 + scale * torch.randn(60, 7, generator=draw)
    labels_N = torch.randint(4, (60,), generator=draw)
    queries_QD = 5 + scale * torch.randn(25, 7, generator=draw)
    found_QC = votes(memory_ND, labels_N, queries_QD, 10, 4)
    expected = [oracle(memory_ND.tolist(), labels_N.tolist(), query, 10, 4) for query in queries_QD.tolist()]
    assert torch.allclose(found_QC.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(("N", "Q", "D", "k"), [(1, 1, 3, 1), (40, 1, 5, 10), (300, 700, 32, 10), (900, 3, 128, 25)])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_faiss_and_torch_find_the_same_neighbours(N, Q, D, k, offset):
    if library() is None:
        pytest.skip("faiss is not installed: pip install 'attune-fl[knn]'")
    draw = torch.Generator().manual_seed(N)
    memory_ND, queries_QD = offset + torch.randn(N, D, generator=draw), offset + torch.randn(Q, D, generator=draw)
    by_faiss, by_torch = nearest_faiss(library(), memory_ND, queries_QD, k), nearest_torch(memory_ND, queries_QD, k)
    exact_QN = torch.cdist(queries_QD.double(), memory_ND.double(), compute_mode="donot_use_mm_for_euclid_dist")
    expected = exact_QN.topk(k, dim=1, largest=False).indices.sort(dim=1).values
    assert torch.equal(by_faiss.sort(dim=1).values, expected)
    assert torch.equal(by_torch.sort(dim=1).values, expected)


def test_queries_in_batches_are_as_in_one(monkeypatch):
    draw = torch.Generator().manual_seed(3)
    memory_ND, queries_QD = torch.randn(30, 4, generator=draw), torch.randn(23, 4, generator=draw)
    whole = nearest_torch(memory_ND, queries_QD, 5)
    monkeypatch.setattr(subject, "BATCH", 7)
    assert torch.equal(whole, nearest_torch(memory_ND, queries_QD, 5))


def test_fewer_samples_than_neighbours(way):
    memory_ND, labels_N = torch.tensor([[0.0], [1.0]]), torch.tensor([1, 1])
    assert nearest(memory_ND, torch.zeros(1, 1), 2).shape == (1, 2)
    assert votes(memory_ND, labels_N, torch.zeros(3, 1), 10, 3).tolist() == [[0.0, 1.0, 0.0]] * 3


@pytest.mark.parametrize(("capacity", "kept"), [(1.0, 20), (0.25, 5), (0.001, 1)])
def test_memory_is_the_features_in_evaluation_mode_of_a_share_of_the_samples(monkeypatch, capacity, kept):
    monkeypatch.setattr(base, "BATCH", 6)
    x = torch.arange(40.0).view(20, 2)
    tensors = Knn(KnnSettings(capacity=capacity)).prepare(task_of(Body(2, 3).train(), x, torch.arange(20) % 3))
    rows = (tensors[FEATURES][:, 0] / 2).long()
    assert len(rows) == kept and rows.unique().numel() == kept
    assert torch.equal(tensors[FEATURES], x[rows]) and torch.equal(tensors[LABELS], rows % 3)


def test_every_position_of_a_sequence_is_a_sample(way):
    model = Body(2, 3).eval()
    x, y = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0)), torch.arange(20).view(4, 5) % 3
    knn = Knn(KnnSettings(neighbours=1, knn_weight=1.0))
    tensors = knn.prepare(task_of(model, x, y))
    assert tensors[FEATURES].shape == (20, 2)
    with torch.no_grad():
        assert torch.equal(knn.logits(Network(model), tensors, x).argmax(-1), y)


def test_weight_zero_is_the_model_and_so_is_no_memory(way):
    model = Body(3, 4).eval()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, generator=draw)
    knn = Knn(KnnSettings(knn_weight=0.0))
    with torch.no_grad():
        mixed = knn.logits(Network(model), knn.prepare(task_of(model, x, torch.zeros(9, dtype=torch.int64))), x)
        assert torch.allclose(mixed, model(x).log_softmax(dim=-1), atol=1e-6)
        empty = knn.prepare(task_of(model, x[:0], torch.zeros(0, dtype=torch.int64)))
        assert FEATURES not in empty
        assert torch.equal(knn.logits(Network(model), empty, x), model(x))


def test_a_class_without_any_vote_has_finite_logits(way):
    model = Body(2, 3).eval()
    knn = Knn(KnnSettings(knn_weight=1.0))
    tensors = knn.prepare(task_of(model, torch.ones(2, 2), torch.tensor([1, 1])))
    with torch.no_grad():
        logits = knn.logits(Network(model), tensors, torch.full((1, 2), 1e4))
    assert torch.isfinite(logits).all() and logits.argmax().item() == 1


def test_cancelled_between_batches():
    with pytest.raises(Cancelled):
        Knn(KnnSettings()).prepare(task_of(Body(2, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), lambda: True))


def test_the_row_has_the_published_defaults():
    assert repr(predictor_for(configure(get("fedtp+knn"), {}))) == f"Knn({KnnSettings()})"
    assert KnnSettings().capacity == 1.0
