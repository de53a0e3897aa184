"""A label for every position: shapes, the visible positions, and the leak of the published text model (errata E3)."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.settings.objectives import ModelSettings, SgdSettings
from attune.common.models import registry
from attune.common.models.options import cautions
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.fedclient.work.executor import alone
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import Trainer

STEPS, LETTERS = 6, 7
MODELS = ["transformer", "lstm"]

SEEDS = {"batches": 1, "dropout": 2}.__getitem__


def build(name: str, per_position: bool = True, steps: int = STEPS, **options: object) -> nn.Module:
    options = options or ({"width": 9} if name == "lstm" else {})
    return registry.build(registry.default_spec("tokens", (steps,), 5, LETTERS, name, options, per_position), 3).eval()


def tokens(count: int, steps: int = STEPS, letters: int = LETTERS, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, letters, (count, steps), generator=torch.Generator().manual_seed(seed))


def trainer(model: nn.Module) -> Trainer:
    settings = TrainSettings(lr=0.1, batch_size=32, local_epochs=10)
    return Trainer(model, Sgd(SgdSettings()), PlainPredictor(ModelSettings()), settings, torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_a_position_are_those_of_the_sequence_that_ends_there(name):
    every, last = build(name).double(), build(name, per_position=False).double()
    assert tensors_of(every).keys() == tensors_of(last).keys()
    x_BT = tokens(4)
    logits_BTC = every(x_BT)
    assert logits_BTC.shape == (4, STEPS, 5)
    for t in range(STEPS):
        assert torch.allclose(logits_BTC[:, t], last(x_BT[:, : t + 1]), rtol=0, atol=1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sampled_from(MODELS), st.integers(0, STEPS - 2), st.integers(0, 99))
def test_no_bit_of_a_position_depends_on_what_follows(name, t, seed):
    model, x_BT = build(name), tokens(3, seed=seed)
    changed_BT = x_BT.clone()
    changed_BT[:, t + 1 :] = (x_BT[:, t + 1 :] + 1) % LETTERS
    logits_BTC, other_BTC = model(x_BT), model(changed_BT)
    assert torch.equal(logits_BTC[:, : t + 1], other_BTC[:, : t + 1])
    assert not torch.equal(logits_BTC[:, t + 1], other_BTC[:, t + 1])


def test_with_leaky_targets_every_position_depends_on_the_next_token():
    model, x_BT = build("transformer", leaky_targets=True), tokens(3)
    for t in range(STEPS - 1):
        changed_BT = x_BT.clone()
        changed_BT[:, t + 1] = (x_BT[:, t + 1] + 1) % LETTERS
        assert not torch.equal(model(x_BT)[:, t], model(changed_BT)[:, t])


def test_on_random_text_the_leaky_model_is_right_and_the_causal_one_guesses():
    """Use text drawn evenly from A = 5 letters, whose next letters cannot be predicted.

    Windows of T = 4 give (T-1)/T + 1/(A T) = 0.8 by the leak, and 1/5 without. Four standard deviations of the test part are
    0.04 and 0.03.
    """
    window, letters, count = 4, 5, 400
    text = tokens(2 * count, window + 1, letters)
    x, y = text[:, :-1], text[:, 1:]
    by_position = {}
    for leaky in (True, False):
        spec = registry.default_spec("tokens", (window,), letters, letters, None, {"leaky_targets": leaky}, True)
        model = registry.build(spec, 0)
        device = trainer(model)
        trained = alone(device.training(tensors_of(model), {}, x[:count], y[:count], SEEDS)).tensors
        logits_NTC = torch.cat([logits for _, logits in device.logits(trained, x[count:])])
        by_position[leaky] = (logits_NTC.argmax(-1) == y[count:]).double().mean(dim=0)
        assert device.evaluate(trained, x[count:], y[count:]) == pytest.approx(float(by_position[leaky].mean()))
    assert float(by_position[True].mean()) == pytest.approx(3 / 4 + 1 / 20, abs=0.04)
    assert by_position[True][:-1].min() > 0.97 and float(by_position[True][-1]) == pytest.approx(1 / 5, abs=0.08)
    assert float(by_position[False].mean()) == pytest.approx(1 / 5, abs=0.05)


def test_the_leak_is_an_option_that_says_what_it_is():
    assert not registry.default_spec("tokens", (4,), 3, 9, None, {}, True).options["leaky_targets"]
    (said,) = cautions(None, {"leaky_targets": True})
    assert "its label" in said and "E3" in said
    assert cautions("transformer", {"leaky_targets": False}) == cautions("my.own:model", {"leaky_targets": True}) == []


@pytest.mark.parametrize(
    ("kind", "shape", "per_position", "options", "message"),
    [
        ("tokens", (4,), False, {"leaky_targets": True}, "model.leaky_targets: there is nothing to leak"),
        ("tabular", (4,), False, {"leaky_targets": True}, "model.leaky_targets: there is nothing to leak"),
        ("series", (4, 2), True, {}, "only tokens and images can have a label for every position, not series"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, shape, per_position, options, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        registry.default_spec(kind, shape, 3, 9, "transformer", options, per_position)


def one_label_whatever_is_asked(spec: ModelSpec) -> nn.Module:
    """Make a user's model that ignores spec.per_position."""
    return nn.Sequential(nn.Embedding(spec.vocabulary, 4), nn.Flatten(), nn.Linear(4 * spec.shape[0], spec.classes))


def test_a_custom_model_that_labels_sequences_is_refused_even_if_shapes_broadcast():
    spec = registry.default_spec("tokens", (4,), 3, 9, f"{__name__}:one_label_whatever_is_asked", {}, True)
    model = registry.build(spec, 0)
    x, y = tokens(4, 4), tokens(4, 4, 3)
    with pytest.raises(SettingError, match=r"scores of shape \(4, 3\) for labels of shape \(4, 4\)"):
        trainer(model).evaluate(tensors_of(model), x, y)
    with pytest.raises(SettingError, match=r"spec\.per_position"):
        alone(trainer(model).training(tensors_of(model), {}, x, y, SEEDS))
