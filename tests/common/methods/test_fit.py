"""A model is tried before devices come: its faults are named at the server's first start, and when a plan is made."""

import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import attune
from attune.common.errors import AttuneError, SettingError
from attune.common.methods.fit import check_model
from attune.common.methods.method import configure
from attune.common.methods.registry import get
from attune.common.models import registry
from attune.common.plan import ModelSpec
from attune.fedserver.core import planning
from attune.fedserver.lab.declared import check_declared

IMAGE = {"kind": "images", "shape": [8, 8, 1], "classes": [0, 1, 2]}


@dataclass
class ImageClassifierOutput:
    logits: Any


class Wrapped(nn.Module):
    """Model that returns something made of its logits."""

    def __init__(self, wrap: Any, classes: int = 3) -> None:
        super().__init__()
        self.head, self.wrap = nn.Linear(64, classes), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.head(x.flatten(1)))


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.head.weight.T


MODELS = {
    "plain": lambda spec: Wrapped(lambda logits: logits),
    "output": lambda spec: Wrapped(ImageClassifierOutput),
    "tuple": lambda spec: Wrapped(lambda logits: (logits, 3)),
    "odd": lambda spec: Wrapped(lambda logits: ImageClassifierOutput([1])),
    "narrow": lambda spec: Wrapped(lambda logits: logits, classes=2),
    "integers": lambda spec: Wrapped(lambda logits: logits.round().long()),
    "raises": lambda spec: Raises(),
    "uncalled": lambda spec: NeverCalled(),
    "wrong": lambda spec: 1 / 0,
}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tried_models")
    for name, factory in MODELS.items():
        setattr(module, name, factory)
    monkeypatch.setitem(sys.modules, "tried_models", module)


def spec(name: str) -> ModelSpec:
    return ModelSpec(f"tried_models:{name}", "images", (8, 8, 1), 3)


@pytest.mark.parametrize("name", ["plain", "output"])
def test_a_model_that_fits(models: None, name: str) -> None:
    check_model(spec(name), configure(get("fedavg"), {}))
    check_model(spec(name), configure(get("fedrod"), {}))


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("tuple", "fedavg", "Wrapped returned tuple of Tensor, int, which has no logits"),
        ("odd", "fedavg", "Wrapped returned ImageClassifierOutput, which has no logits"),
        ("narrow", "fedavg", r"scores of shape \(2, 2\) for 2 samples; \(2, 3\) is needed"),
        ("integers", "fedavg", "scores of type torch.int64"),
        ("raises", "fedavg", r"cannot score a batch of shape \(2, 1, 8, 8\) .*RuntimeError: mat1 and mat2"),
        ("wrong", "fedavg", "could not be made for images of shape .*ZeroDivisionError"),
        ("uncalled", "fedrod", "never calls its head 'head'"),
        ("uncalled", "fedtp+knn", "no tensor of the model NeverCalled is '@qkv'"),
        ("plain", "fedtp", "no tensor of the model Wrapped is '@qkv'"),
    ],
)
def test_what_is_wrong_is_named(models: None, name: str, method: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_model(spec(name), configure(get(method), {}))


def test_a_declared_federation_is_checked_before_a_home_is_made(models: None, tmp_path: Path) -> None:
    home = tmp_path / "server"
    with pytest.raises(SettingError, match="returned ImageClassifierOutput"):
        attune.serve("fedavg", "tried_models:odd", settings={"data": IMAGE}, home=home, port=0)
    assert not home.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"name": "dnn"}, "method": {"name": "fedtp"}},
            "model dnn has no tensors of the roles qkv, .*models that have",
        ),
        ({"model": {"name": "no_such_module:make"}}, "cannot be imported"),
        (
            {"model": {"name": "huggingface", "type": "vti"}, "data": IMAGE, "method": {"name": "fedavg"}},
            "no Hugging Face model 'vti'",
        ),
    ],
)
def test_what_can_be_known_at_a_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_declared(planning.resolve(settings))


def test_tokens_may_be_labelled_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tried_models")
    module.each = lambda spec: nn.Sequential(
        OrderedDict(embed=nn.Embedding(spec.vocabulary, 8), head=nn.Linear(8, spec.classes))
    )
    monkeypatch.setitem(sys.modules, "tried_models", module)
    given = {"model": {"name": "tried_models:each"}, "method": {"name": "fedavg"}, "data": {"kind": "tokens", "shape": [6]}}
    check_declared(planning.resolve(given))


def test_a_simulation_ends_before_its_first_round() -> None:
    x, y = np.random.default_rng(0).random((20, 8, 8, 1), np.float32), np.arange(20) % 3
    with pytest.raises(AttuneError, match="Wrapped returned tuple"):
        attune.simulate({"kiel": (x, y), "lund": (x, y)}, "fedavg", Wrapped(lambda logits: (logits,)), rounds=1)


def test_an_output_with_logits_learns_as_the_plain_model_does(models: None) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((40, 8, 8, 1), dtype=np.float32)
    shards = {name: (x, (x[:, 0, at, 0] > 0.5).astype(int) + 0) for at, name in enumerate(("kiel", "lund"))}
    torch.manual_seed(0)
    plain = Wrapped(lambda logits: logits, classes=2)
    told = Wrapped(ImageClassifierOutput, classes=2)
    told.load_state_dict(plain.state_dict())
    one, other = (attune.simulate(shards, "fedrod", model, rounds=2) for model in (plain, told))
    assert one.digests == other.digests


VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("kind", "shape", "per_position", "options"),
    [
        ("images", (8, 8, 1), False, {"type": "vit", "config": VIT}),
        ("tokens", (6,), False, {"type": "bert", "config": BERT}),
        ("tokens", (6,), True, {"type": "gpt2", "config": GPT2}),
        ("tokens", (6,), False, {"type": "gpt2", "config": GPT2}),
    ],
)
def test_hugging_face_models_from_a_config(kind: Any, shape: Any, per_position: bool, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    made = registry.default_spec(kind, shape, 3, 20 if kind == "tokens" else 0, "huggingface", options, per_position)
    check_model(made, configure(get("fedtp"), {}))
    one, two = registry.build(made, 4), registry.build(made, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert sum(t.numel() for t in registry.build(made, 0, device="meta").state_dict().values()) > 0


def test_a_federation_of_a_hugging_face_model() -> None:
    pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    x = rng.random((30, 8, 8, 1), dtype=np.float32)
    shards = {name: (x, (x[:, 0, at, 0] > 0.5).astype(int)) for at, name in enumerate(("kiel", "lund"))}
    result = attune.simulate(shards, "fedtp", "huggingface", rounds=1, settings={"model": {"type": "vit", "config": VIT}})
    assert len(result.model("kiel").predict(x)) == 30


def test_the_command_says_it_on_one_line(tmp_path: Path) -> None:
    from attune.fedserver.cli import cli

    said = CliRunner().invoke(cli, ["--model", "mlr", "--method", "fedtp", "--port", "0", "--home", str(tmp_path / "server")])
    assert isinstance(said.exception, SettingError) and "model mlr has no tensors of the roles qkv" in str(said.exception)
