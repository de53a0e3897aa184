"""Losses, the proximal term, optimizers and schedules against steps by hand; without them no plan has changed."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import attune
from attune.common.config import TrainSettings, convert
from attune.common.errors import SettingError
from attune.common.methods.settings.objectives import ModelSettings, ProximalSettings, SgdSettings
from attune.fedclient.work.measures import mean_cross_entropy
from attune.fedclient.work.objectives.augment import augmented
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.objectives.proximal import Proximal, pulled
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import Trainer

START = 1.0


class OneWeight(nn.Module):
    """Model with scores (0, w x): with one sample x = 1 of class 0 the gradient of w is sigmoid(w)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(x), self.head(x)], dim=1)


def moved(round_: int = 0, **settings: Any) -> float:
    """Return the weight after one order on one sample."""
    usual = {"lr": 0.1, "momentum": 0.0, "clip_norm": 0.0, "batch_size": 1, "local_steps": 2}
    trainer = Trainer(
        OneWeight(), Sgd(SgdSettings()), PlainPredictor(ModelSettings()), convert(TrainSettings, usual | settings, ""),
        torch.device("cpu"),
    )  # fmt: skip
    start = {"head.weight": torch.tensor([[START]])}
    work = trainer.training(start, {}, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), lambda purpose: 0, round_=round_)
    from attune.fedclient.work.executor import alone

    return float(alone(work).tensors["head.weight"])


def by_hand(*rates: float) -> float:
    w = START
    for rate in rates:
        w -= rate / (1 + math.exp(-w))
    return w


def test_plain_sgd_and_its_name_are_the_same() -> None:
    assert moved() == moved(optimizer="sgd", schedule="constant") == pytest.approx(by_hand(0.1, 0.1), rel=1e-6)


def test_schedules_within_an_order() -> None:
    assert moved(schedule="linear") == pytest.approx(by_hand(0.1, 0.05), rel=1e-6)
    assert moved(schedule="cosine", local_steps=3) == pytest.approx(by_hand(0.1, 0.075, 0.025), rel=1e-6)


def test_the_rate_decays_from_round_to_round() -> None:
    assert moved(lr_decay=0.5, round_=1) == pytest.approx(by_hand(0.1, 0.1), rel=1e-6)
    assert moved(lr_decay=0.5, round_=3) == pytest.approx(by_hand(0.025, 0.025), rel=1e-6)


def test_adams_first_step_is_as_long_as_its_rate() -> None:
    for name in ("adam", "adamw"):
        assert moved(optimizer=name, local_steps=1) == pytest.approx(START - 0.1, rel=1e-5)
    assert moved(optimizer="adamw", local_steps=1, weight_decay=0.2) == pytest.approx(START * (1 - 0.1 * 0.2) - 0.1, rel=1e-5)


def test_rmsprop_and_adagrad() -> None:
    gradient = 1 / (1 + math.exp(-START))
    assert moved(optimizer="adagrad", local_steps=1) == pytest.approx(START - 0.1, rel=1e-5)
    assert moved(optimizer="rmsprop", local_steps=1) == pytest.approx(
        START - 0.1 * gradient / math.sqrt(0.01 * gradient**2), rel=1e-4
    )


@pytest.mark.parametrize("wrong", [{"optimizer": "adamm"}, {"lr_decay": 1.5}, {"augment": ["mirror"]}, {"schedule": "step"}])
def test_unknown_ones_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        convert(TrainSettings, wrong, "train.")


def test_what_is_not_set_is_not_in_the_plan() -> None:
    """Let a device of the first version read the plan of a federation that uses no new setting."""
    said = msgspec.json.decode(msgspec.json.encode(TrainSettings()))
    assert not {"optimizer", "schedule", "lr_decay", "augment", "evaluate"} & said.keys()
    more = convert(TrainSettings, {"optimizer": "adamw", "augment": ["flip"]}, "")
    assert msgspec.json.decode(msgspec.json.encode(more), type=TrainSettings) == more and hash(more)


def test_augmented_images() -> None:
    x = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).view(2, 3, 8, 8) + 1
    torch.manual_seed(0)
    for image, one in zip(augmented(x, ["flip"]), x, strict=True):
        assert torch.equal(image, one) or torch.equal(image, one.flip(-1))
    for image, one in zip(augmented(x, ["crop"]), x, strict=True):
        wide = torch.zeros(3, 10, 10)
        wide[:, 1:9, 1:9] = one
        assert any(torch.equal(image, wide[:, a : a + 8, b : b + 8]) for a in range(3) for b in range(3))
    erased = augmented(torch.ones(50, 1, 8, 8), ["erase"])
    assert 0 < float((erased == 0).sum(dim=(1, 2, 3)).max()) <= 16
    assert float((augmented(x, ["noise"]) - x).std()) == pytest.approx(0.05, rel=0.2)
    assert all(torch.equal(x, before) for before in [torch.arange(384, dtype=torch.float32).view(2, 3, 8, 8) + 1])


def shards(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.random((24, 8, 8, 1), dtype=np.float32) if kind == "images" else rng.random((24, 4), dtype=np.float32)
    return {name: (x, np.arange(24) % 2) for name in ("kiel", "lund")}


def test_augmentation_is_drawn_from_the_seed_and_is_for_images() -> None:
    given = {"train.augment": ["flip", "crop"], "train.optimizer": "adamw", "train.lr": 0.001}
    one, two = (attune.simulate(shards("images"), "fedavg", rounds=1, settings=given) for _ in range(2))
    plain = attune.simulate(shards("images"), "fedavg", rounds=1, settings={**given, "train.augment": []})
    assert one.digests == two.digests != plain.digests
    with pytest.raises(SettingError, match=r"train.augment is for images, and the devices have tabular"):
        attune.simulate(shards("tables"), "fedavg", rounds=1, settings=given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"optimizer": "adam"}, "adam"),
        ({"schedule": "cosine"}, "rate"),
        ({"augment": ["flip"]}, "augm"),
        ({"mixed_precision": "bf16"}, "bf16"),
    ],
)
def test_what_cannot_be_stacked_goes_one_by_one_with_the_same_bits(given: dict[str, Any], why: str) -> None:
    settings = {f"train.{key}": value for key, value in given.items()}
    one = attune.simulate(shards("images"), "fedavg", "mlr", rounds=1, settings=settings)
    side = attune.simulate(shards("images"), "fedavg", "mlr", rounds=1, settings=settings, executor="stacked")
    assert one.digests == side.digests and any(why in reason for reason in side.one_by_one)


def test_the_term_by_hand():
    """Expect mu/2 * 2^2 and the gradient mu * 2 for received 1 and theta 3; tensors without a centre have no term."""
    w = torch.tensor([[3.0], [0.0]], requires_grad=True)
    private = torch.tensor([9.0], requires_grad=True)
    centre = torch.tensor([[1.0], [0.0]], requires_grad=True)
    loss = pulled(torch.tensor(2.0), {"w": w, "private": private}, {"w": centre}, 0.25)
    assert loss.item() == pytest.approx(2 + 0.25 / 2 * 4)
    loss.backward()
    assert w.grad.flatten().tolist() == pytest.approx([0.25 * 2, 0.0])
    assert private.grad is None and centre.grad is None


def test_running_statistics_are_not_pulled(make_task):
    """Receive running statistics, which are not trained: the term is that of the weights."""
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 2, bias=False))
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    received = {name: tensor + 1 for name, tensor in start.items()}
    x, y = torch.zeros(2, 1), torch.tensor([0, 1])
    trained = Proximal(ProximalSettings(mu=0.5)).run(make_task(model, x, y, start, received))
    assert trained.loss == pytest.approx(0.6931472 + 0.25 * 2)
    assert trained.tensors["1.weight"].flatten().tolist() == pytest.approx((start["1.weight"] + 0.25).flatten().tolist())


def test_without_mu_it_is_sgd_bit_by_bit(make_task):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3)
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    x, y = torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1])
    task = make_task(model, x, y, start, {name: tensor * 0 for name, tensor in start.items()}, batch_size=2, momentum=0.9)
    prox, plain = Proximal(ProximalSettings(mu=0)).run(task), Sgd(SgdSettings()).run(task)
    assert prox.loss == plain.loss
    assert all(prox.tensors[name].equal(plain.tensors[name]) for name in start)
    assert not plain.tensors["weight"].equal(start["weight"]) and task.start["weight"].equal(model.weight)


def test_loss_over_positions_counts_each_one():
    """Use two positions with probabilities 1/2 and 1/4 for the right symbol: (ln 2 + ln 4) / 2."""
    logits_NTC = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]))
    assert mean_cross_entropy(logits_NTC, torch.tensor([[0, 1]])).item() == pytest.approx(1.5 * 0.6931472)
