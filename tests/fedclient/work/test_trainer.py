"""Local training against numbers by hand, with the same bits every time."""

import math

import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import ModelSettings, SgdSettings
from attune.fedclient.work.executor import alone
from attune.fedclient.work.measures import mean_cross_entropy
from attune.fedclient.work.objectives.descent import Sgd, TrainingDiverged, batches
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import Trainer

CPU = torch.device("cpu")


def seeds(for_batches, for_dropout):
    return {"batches": for_batches, "dropout": for_dropout}.__getitem__


SEEDS = seeds(1, 2)


def trainer(model, objective=None, **settings):
    usual = {"lr": 0.5, "momentum": 0.0, "batch_size": 100, "local_epochs": 1, "clip_norm": 0.0}
    return Trainer(
        model, objective or Sgd(SgdSettings()), PlainPredictor(ModelSettings()), TrainSettings(**(usual | settings)), CPU
    )


def two_weights():
    """Return a model with logits (a x, b x) from weights (2, 1)."""
    return nn.Linear(1, 2, bias=False)


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def start_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def data(samples=25):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(samples, 4, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def test_one_step_by_hand():
    # One sample x = 2 of class 0, weights 0: p = (1/2, 1/2), gradient of the loss = (p0 - 1, p1) * x = (-1, 1).
    start = {"weight": torch.zeros(2, 1)}
    result = alone(trainer(two_weights()).training(start, {}, torch.tensor([[2.0]]), torch.tensor([0]), SEEDS))
    assert result.tensors["weight"].tolist() == [[0.5], [-0.5]]
    assert result.loss == pytest.approx(math.log(2))
    assert start["weight"].tolist() == [[0.0], [0.0]]


def test_momentum_and_decay_by_hand():
    # Step 1: g = (-1, 1); w = (.5, -.5). Step 2: logits (1, -1), p1 = 1 / (1 + e^2); g = (-2 p1, 2 p1) + 0.1 w; v = 0.9 v + g.
    p1 = 1 / (1 + math.exp(2))
    g = [-2 * p1 + 0.05, 2 * p1 - 0.05]
    v = [-0.9 + g[0], 0.9 + g[1]]
    made = trainer(two_weights(), momentum=0.9, weight_decay=0.1, local_epochs=2)
    result = alone(made.training({"weight": torch.zeros(2, 1)}, {}, torch.tensor([[2.0]]), torch.tensor([0]), SEEDS))
    assert result.tensors["weight"].flatten().tolist() == pytest.approx([0.5 - 0.5 * v[0], -0.5 - 0.5 * v[1]], rel=1e-6)
    assert result.loss == pytest.approx(-math.log(1 - p1)), "the loss is that of the last epoch"


def test_the_gradient_is_clipped_to_its_norm():
    # The gradient (-1, 1) has norm sqrt 2; clipped to 0.1 it is (-0.0707, 0.0707).
    result = alone(
        trainer(two_weights(), clip_norm=0.1).training(
            {"weight": torch.zeros(2, 1)}, {}, torch.tensor([[2.0]]), torch.tensor([0]), SEEDS
        )
    )
    assert result.tensors["weight"].flatten().tolist() == pytest.approx([0.05 / math.sqrt(2), -0.05 / math.sqrt(2)], rel=1e-4)


def test_the_same_seeds_give_the_same_bits_and_others_do_not():
    model = dropping()
    start, (x, y) = start_of(model), data()
    made = trainer(model, batch_size=8, local_epochs=3, momentum=0.9)
    runs = [alone(made.training(start, {}, x, y, drawn)) for drawn in (SEEDS, SEEDS, seeds(1, 3), seeds(4, 2))]
    for name, value in runs[0].tensors.items():
        assert value.equal(runs[1].tensors[name])
    assert runs[0].loss == runs[1].loss
    assert len({run.loss for run in runs}) == 3


def test_batches_cover_every_epoch_and_use_the_last_incomplete_one():
    settings = TrainSettings(batch_size=8, local_epochs=2)
    made = list(batches(20, settings, seed=5))
    assert [len(batch) for batch in made] == [8, 8, 4, 8, 8, 4]
    assert sorted(torch.cat(made[:3]).tolist()) == list(range(20))
    assert torch.cat(made[:3]).tolist() != torch.cat(made[3:]).tolist()


def test_local_steps_count_batches_and_reshuffle_when_exhausted():
    made = list(batches(20, TrainSettings(batch_size=8, local_steps=5), seed=5))
    assert [len(batch) for batch in made] == [8, 8, 4, 8, 8]
    assert made[0].equal(next(batches(20, TrainSettings(batch_size=8, local_epochs=1), seed=5)))


def test_the_loss_of_local_steps_is_over_all_of_them():
    result = alone(
        trainer(two_weights(), lr=1e-12, local_steps=3, batch_size=2).training(
            {"weight": torch.tensor([[1.0], [0.0]])}, {}, torch.tensor([[0.0], [0.0], [4.0]]), torch.tensor([0, 0, 1]), SEEDS
        )
    )
    # Every sample is seen once in the first two steps; the third takes two of them again, seeded.
    seen = torch.cat(list(batches(3, TrainSettings(batch_size=2, local_steps=3), SEEDS("batches"))))
    losses = torch.tensor([math.log(2), math.log(2), math.log(1 + math.exp(4))])
    assert result.loss == pytest.approx(float(losses[seen].mean()), rel=1e-6)


def test_a_batch_larger_than_the_shard_is_one_step_an_epoch():
    model = dropping()
    steps = []
    alone(trainer(model, batch_size=1000, local_epochs=3).training(start_of(model), {}, *data(5), SEEDS, progress=steps.append))
    assert steps == pytest.approx([1 / 3, 2 / 3, 1])


def test_running_statistics_are_trained_state_and_weights_that_are_frozen_stay():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].bias.requires_grad_(False)
    start, (x, y) = start_of(model), data()
    result = alone(trainer(model).training(start, {}, x, y, SEEDS))
    assert result.tensors.keys() == start.keys()
    assert result.tensors["0.running_mean"].tolist() == pytest.approx((0.1 * x.mean(0)).tolist(), rel=1e-5)
    assert int(result.tensors["0.num_batches_tracked"]) == 1
    assert result.tensors["1.bias"].equal(start["1.bias"])
    assert int(start["0.num_batches_tracked"]) == 0


def test_a_loss_that_is_not_finite_names_the_learning_rate():
    start = {"weight": torch.ones(2, 1)}
    for epochs in (1, 4):  # after a single step the loss is still finite, and the weights are not
        with pytest.raises(TrainingDiverged, match=r"lr 3e\+38"):
            made = trainer(two_weights(), lr=3e38, local_epochs=epochs)
            alone(made.training(start, {}, torch.tensor([[1e3]]), torch.tensor([0]), SEEDS))


def test_evaluation_is_without_dropout_and_over_all_batches():
    model = dropping()
    start, (x, y) = start_of(model), data(1100)
    model.eval()
    right = (model(x).argmax(1) == y).sum().item()
    model.train()
    assert trainer(model).evaluate(start, x, y) == right / 1100
    assert mean_cross_entropy(model.eval()(x), y) > 0
