"""Cases that the traces of whole methods do not cover: batches, frozen layers, running statistics, any model, ends."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attune.common.errors import SettingError
from attune.common.methods.settings.objectives import (
    AlternatingSettings,
    FineTuneSettings,
    MamlSettings,
    MoreauSettings,
    OwnModelSettings,
    SgdSettings,
    TwoHeadsSettings,
)
from attune.common.seeds import derive
from attune.contrib.gp.method import GpObjectiveSettings
from attune.contrib.gp.objective import GpObjective
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask, Network, extras_of
from attune.fedclient.work.objectives.descent import Alternating, Cancelled, Maml, Sgd, TrainingDiverged, batches
from attune.fedclient.work.objectives.proximal import Moreau, OwnModel
from attune.fedclient.work.objectives.two_heads import TwoHeads, log_prior
from attune.fedclient.work.predictors.base import FineTune


def data(samples=10):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(samples, 2, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def normed():
    torch.manual_seed(0)
    layers = OrderedDict(body=nn.Linear(2, 4), norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.3), head=nn.Linear(4, 3))
    return nn.Sequential(layers)


def start_of(model, objective):
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return tensors | extras_of(objective, tensors, Network(model))


OBJECTIVES = {
    "sgd": Sgd(SgdSettings()),
    "maml": Maml(MamlSettings(alpha=0.1, beta=0.1)),
    "moreau": Moreau(MoreauSettings(mu=0.5, inner_steps=2)),
    "own-model": OwnModel(OwnModelSettings()),
    "alternating": Alternating(AlternatingSettings(head_epochs=3, body_epochs=1)),
    "two-heads": TwoHeads(TwoHeadsSettings()),
    "gp": GpObjective(GpObjectiveSettings()),
}
KINDS = {"head.weight": "private", "head.bias": "private"}


@pytest.fixture
def make(make_task):
    def task(objective, **settings):
        model = normed()
        return make_task(model, *data(), start_of(model, objective), kinds=KINDS, **({"batch_size": 4, "lr": 0.1} | settings))

    return task


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_tensor_comes_back_the_same_bits_again_and_the_start_is_untouched(name, make):
    objective = OBJECTIVES[name]
    task = make(objective, momentum=0.9)
    before = {key: tensor.clone() for key, tensor in task.start.items()}
    one, two = objective.run(task), objective.run(task)
    assert one.loss == two.loss and one.tensors.keys() == before.keys()
    for key, tensor in before.items():
        assert task.start[key].equal(tensor) and one.tensors[key].equal(two.tensors[key])
        assert one.tensors[key].dtype == tensor.dtype and not one.tensors[key].requires_grad
    changed = {"body.weight", "head.weight", "norm.running_mean"} - ({"head.weight"} if name == "gp" else set())
    assert not any(one.tensors[key].equal(before[key]) for key in changed)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_progress_rises_to_one_and_work_ends_when_it_is_cancelled(name, make):
    objective, seen = OBJECTIVES[name], []
    objective.run(LocalTask(**{**vars(make(objective)), "progress": seen.append}))
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1) and len(seen) >= 3
    stopped = []
    task = LocalTask(
        **{**vars(make(objective)), "progress": stopped.append, "cancelled": lambda: len(stopped) == len(seen) - 1}
    )
    with pytest.raises(Cancelled):
        objective.run(task)
    assert stopped == seen[:-1]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_diverges_is_said(name, make):
    objective = Maml(MamlSettings(alpha=1e30, beta=1e30)) if name == "maml" else OBJECTIVES[name]
    with pytest.raises(TrainingDiverged, match=r"lower train\.lr"):
        objective.run(make(objective, lr=1e30, local_epochs=3))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bf16_trains_float32_weights(name, make):
    objective = OBJECTIVES[name]
    exact, rough = objective.run(make(objective)), objective.run(make(objective, mixed_precision="bf16"))
    assert all(tensor.dtype == exact.tensors[key].dtype for key, tensor in rough.tensors.items())
    assert rough.loss == pytest.approx(exact.loss, rel=0.1) and rough.loss != exact.loss


def test_maml_takes_its_inner_batches_beside_fedavgs(make_task):
    """Take one sample per batch, and compute theta and gradients in numpy for the two sequences of samples."""
    W = np.array([[0.1, -0.2], [0.3, 0.0], [-0.1, 0.2]])
    model = nn.Linear(2, 3, bias=False).double()
    x, y = data(4)
    task = make_task(model, x.double(), y, {"weight": torch.from_numpy(W)}, batch_size=1, local_epochs=2)
    outer, inner = ([int(i) for i in batches(4, task.settings, derive(7, what))] for what in ("batches", "batches inner"))
    assert outer != inner and sorted(inner[:4]) == [0, 1, 2, 3] and len(inner) == 8

    def gradient(at, V):
        score = np.exp(V @ x[at].double().numpy())
        return np.outer(score / score.sum() - np.eye(3)[y[at]], x[at].double().numpy())

    for first, second in zip(inner, outer, strict=True):
        W = W - 0.3 * gradient(second, W - 0.2 * gradient(first, W))
    trained = Maml(MamlSettings(alpha=0.2, beta=0.3)).run(task)
    np.testing.assert_allclose(trained.tensors["weight"].numpy(), W, rtol=0, atol=1e-12)


def test_the_step_that_maml_trains_for_is_the_one_before_prediction(make_task):
    """Use clipping and decay, and an outer step of almost zero: the loss after it is that of the prepared model."""
    model = nn.Linear(2, 3)
    x, y = data(6)
    start = {name: 20 * value.detach().clone() for name, value in model.state_dict().items()}
    task = make_task(model, x, y, start, lr=0.8, clip_norm=0.05, weight_decay=0.1)
    trained = Maml(MamlSettings(beta=1e-9)).run(task)
    prepared = FineTune(FineTuneSettings(tune_steps=1)).prepare(task)
    assert trained.loss == pytest.approx(task.mean_loss(prepared, x, y).item(), rel=1e-5)
    unclipped = FineTune(FineTuneSettings(tune_steps=1)).prepare(make_task(model, x, y, start, lr=0.8, weight_decay=0.1))
    assert trained.loss != pytest.approx(task.mean_loss(unclipped, x, y).item(), rel=1e-2)


def test_maml_needs_no_gradient_of_every_weight(make_task):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle, self.head = nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x)

    model = Idle()
    task = make_task(model, *data(), start_of(model, OBJECTIVES["maml"]))
    trained = OBJECTIVES["maml"].run(task)
    assert trained.tensors["idle.weight"].equal(task.start["idle.weight"])
    assert not trained.tensors["head.weight"].equal(task.start["head.weight"])


def test_the_exchanged_model_takes_over_running_statistics(make):
    trained = OBJECTIVES["moreau"].run(make(OBJECTIVES["moreau"]))
    for name in ("norm.running_mean", "norm.num_batches_tracked"):
        assert trained.tensors[name].equal(trained.tensors[PERSONAL + name])
    assert int(trained.tensors["norm.num_batches_tracked"]) == 6, "3 batches, 2 steps each"
    assert not trained.tensors["body.weight"].equal(trained.tensors[PERSONAL + "body.weight"])


def test_without_mu_the_exchanged_model_stays(make):
    objective = Moreau(MoreauSettings(mu=0))
    task = make(objective)
    assert objective.run(task).tensors["body.weight"].equal(task.start["body.weight"])


def test_alternating_takes_its_own_epochs_and_freezes_against_decay_too(make):
    """Use a learning rate near zero, so that only decay could move frozen tensors: 3 head epochs of 3 batches come first."""
    objective = OBJECTIVES["alternating"]
    seen, task = [], make(objective, local_steps=50, weight_decay=0.5)
    objective.run(LocalTask(**{**vars(task), "progress": seen.append}))
    assert len(seen) == (3 + 1) * 3, "epochs of 3 batches, whatever local_steps says"
    assert seen[8] == pytest.approx(0.75)
    nothing_private = LocalTask(**{**vars(task), "kinds": {name: "private" for name in task.start if "body" not in name}})
    trained = objective.run(nothing_private)
    head_only = Alternating(AlternatingSettings(head_epochs=3, body_epochs=1)).run(nothing_private)
    assert trained.tensors["head.weight"].equal(head_only.tensors["head.weight"])


def test_the_prior_of_classes_by_hand():
    prior = log_prior(torch.tensor([3, 0, 1]))
    assert prior.tolist() == pytest.approx([np.log(0.75), -np.inf, np.log(0.25)])


def test_a_class_that_the_device_lacks_has_no_gradient(make_task):
    """Check that balanced softmax leaves the row of a missing class; plain softmax would push it away."""
    model = normed()
    x, y = data()
    y = torch.where(y == 2, 0, y)
    task = make_task(model, x, y, start_of(model, OBJECTIVES["two-heads"]), local_epochs=3, batch_size=4)
    trained = OBJECTIVES["two-heads"].run(task)
    assert trained.tensors["head.weight"][2].equal(task.start["head.weight"][2])
    assert trained.tensors["head.bias"][2].equal(task.start["head.bias"][2])
    assert all(not trained.tensors["head.weight"][c].equal(task.start["head.weight"][c]) for c in (0, 1))
    assert trained.tensors[PERSONAL + "head.bias"][2] < 0, "the personal head learns that it does not occur"
    assert np.isfinite(trained.loss)


def test_features_are_what_enters_the_head_of_any_model():
    network = Network(normed().eval())
    x = data()[0]
    tensors = dict(network.model.state_dict())
    logits, features = network.with_features(tensors, x)
    assert network.head == "head" and features.shape == (10, 4)
    assert logits.equal(functional.linear(features, tensors["head.weight"], tensors["head.bias"]))
    assert logits.equal(network(tensors, x)), "and no hook stays"
    assert not network.model.head._forward_pre_hooks


def test_models_without_a_usable_head_are_refused(make_task):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return functional.linear(x, self.head.weight)

    network, headless = Network(Tied()), nn.Sequential(nn.Conv1d(1, 2, 3))
    with pytest.raises(SettingError, match="never calls its head 'head'"):
        network.with_features(dict(network.model.state_dict()), torch.zeros(1, 2))
    with pytest.raises(SettingError, match="no linear head"):
        TwoHeads(TwoHeadsSettings()).run(make_task(headless, *data(), {}))


def test_a_model_whose_names_look_like_a_devices_own_is_refused():
    model = nn.Sequential(OrderedDict(personal=nn.Linear(2, 3)))
    with pytest.raises(SettingError, match=r"personal\.weight"):
        extras_of(OBJECTIVES["own-model"], dict(model.state_dict()), Network(model))


def test_classes_are_counted_up_to_the_models(make_task):
    task = make_task(normed(), torch.zeros(3, 2), torch.tensor([1, 1, 0]), {})
    assert task.class_counts(4).tolist() == [1, 2, 0, 0]
