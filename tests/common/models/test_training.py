"""Training of convolutional and recurrent models on a device, and their mean on a server: same bits, and any batch size."""

import msgspec
import pytest
import torch
from torch import nn
from torch.func import functional_call

from attune.common.config import TrainSettings
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.common.methods.settings.objectives import ModelSettings, SgdSettings
from attune.common.models import registry
from attune.common.models.blocks import ColumnEmbeddings, width_for
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import components, tensors_of
from attune.fedclient.work.executor import alone
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import Trainer
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import Mean

CASES = [
    ("convnet", "images", (8, 8, 1), {}),
    ("convnet-bn", "images", (8, 8, 1), {}),
    ("lstm", "tokens", (6,), {"width": 16}),
    ("lstm", "series", (6, 2), {"width": 16}),
]

SEEDS = {"batches": 1, "dropout": 2}.__getitem__


def built(name: str, kind: str, shape: tuple[int, ...], options: dict[str, int], seed: int = 0) -> nn.Module:
    return registry.build(registry.default_spec(kind, shape, 3, 20, name, options), seed)


def samples(kind: str, shape: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of three classes that differ in their mean, or in their last token."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    if kind == "tokens":
        x = torch.randint(0, 20, (count, *shape), generator=generator)
        x[:, -1] = y
        return x, y
    shape = (shape[2], *shape[:2]) if kind == "images" else shape
    return torch.rand((count, *shape), generator=generator) + y.view(-1, *[1] * len(shape)) / 2, y


def trainer(model: nn.Module, **settings: float) -> Trainer:
    usual = TrainSettings(**({"batch_size": 8, "local_epochs": 2, "lr": 0.02} | settings))
    return Trainer(model, Sgd(SgdSettings()), PlainPredictor(ModelSettings()), usual, torch.device("cpu"))


@pytest.mark.parametrize(("name", "kind", "shape", "options"), CASES)
def test_training_computes_with_the_tensors_it_is_given_and_is_repeatable(name, kind, shape, options):
    """Use 17 samples in batches of 8, so that the last batch is one sample. The module's own tensors must not matter."""
    x, y = samples(kind, shape, 17)
    start = {name: tensor.clone() for name, tensor in tensors_of(built(name, kind, shape, options)).items()}
    runs = [alone(trainer(built(name, kind, shape, options, seed)).training(start, {}, x, y, SEEDS)) for seed in (0, 7)]
    assert runs[0].loss == runs[1].loss and list(runs[0].tensors) == list(start)
    assert all(torch.equal(tensor, runs[1].tensors[key]) for key, tensor in runs[0].tensors.items())
    assert all(not torch.equal(tensor, start[key]) for key, tensor in runs[0].tensors.items())


@pytest.mark.parametrize(("name", "kind", "shape", "options"), CASES)
def test_training_learns(name, kind, shape, options):
    x, y = samples(kind, shape, 60)
    model = built(name, kind, shape, options)
    device = trainer(model, local_epochs=50 if name == "lstm" else 25, lr=0.2 if name == "lstm" else 0.02)
    trained = alone(device.training(tensors_of(model), {}, x, y, SEEDS)).tensors
    assert device.evaluate(trained, x, y) > 0.8


def test_bf16_training():
    for name, kind, shape, options in CASES:
        x, y = samples(kind, shape, 17)
        model = built(name, kind, shape, options)
        device = trainer(model, mixed_precision="bf16")
        trained = alone(device.training(tensors_of(model), {}, x, y, SEEDS)).tensors
        assert all(tensor.dtype == tensors_of(model)[key].dtype and tensor.isfinite().all() for key, tensor in trained.items())


def test_statistics_and_counters_pass_through_a_round():
    """Use two devices of 8 and 24 samples in batches of 8: 1 and 3 batches, weighted (1 + 3 * 3) / 4 = 2.5, to even."""
    model = built("convnet-bn", "images", (8, 8, 1), {})
    start = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    vault = MemoryVault()
    mean = Mean(MeanSettings(), vault, 0, components(model))
    mean.start(start)
    updates = []
    for client, count in (("a", 8), ("b", 24)):
        x, y = samples("images", (8, 8, 1), count)
        trained = alone(trainer(model, local_epochs=1).training(start, {}, x, y, SEEDS))
        updates.append(PartUpdate(client, count, trained.tensors))
    assert [update.tensors["norm3.num_batches_tracked"].item() for update in updates] == [1, 3]
    mean.close_round(updates)
    served = vault.read("value")
    assert served["norm3.num_batches_tracked"].item() == 2 and served["norm3.num_batches_tracked"].dtype == torch.int64
    a, b = (update.tensors["norm1.running_var"] for update in updates)
    assert torch.allclose(served["norm1.running_var"], a / 4 + b * 3 / 4) and not torch.allclose(a, b)


def test_an_lstm_called_with_other_weights_computes_and_differentiates_by_them():
    one, two = (built("lstm", "tokens", (6,), {"width": 16}, seed) for seed in (0, 1))
    given = {name: tensor.clone().requires_grad_() for name, tensor in tensors_of(two).items()}
    x, y = samples("tokens", (6,), 12)
    logits = functional_call(one, given, (x,))
    assert torch.equal(logits, two(x)) and not torch.allclose(logits, one(x))
    nn.functional.cross_entropy(logits, y).backward()
    nn.functional.cross_entropy(two(x), y).backward()
    assert all(torch.equal(given[name].grad, parameter.grad) for name, parameter in two.named_parameters())
    assert all(parameter.grad is None for parameter in one.parameters())


# --- indices of categories in a table become vectors, in every model for tables

EMBEDDED = {"1": 20, "3": 30}


def test_numbers_stay_and_indices_become_vectors() -> None:
    layer = ColumnEmbeddings(4, EMBEDDED)
    x = torch.tensor([[0.5, 3.0, -1.0, 29.0], [0.25, 99.0, 2.0, 0.0]])
    out = layer(x)
    assert out.shape == (2, 2 + width_for(20) + width_for(30)) and torch.equal(out[:, :2], x[:, [0, 2]])
    assert torch.equal(out[1, 2 : 2 + width_for(20)], layer.tables[0].weight[19])


@pytest.mark.parametrize("name", ["mlr", "dnn", "transformer"])
def test_every_model_for_tables_learns_vectors(name: str) -> None:
    plain = default_spec("tabular", (4,), 3, 0, name, {})
    assert b"embedded" not in msgspec.json.encode(plain)
    model = build(msgspec.structs.replace(plain, embedded=EMBEDDED), 0)
    x = torch.rand(5, 4) * 18
    model(x).sum().backward()
    tables = [p for key, p in model.named_parameters() if "tables" in key]
    assert model(x).shape == (5, 3) and len(tables) == 2
    assert all(p.grad is not None and (p.grad != 0).any() for p in tables) or name == "transformer"
    one_by_one = torch.func.vmap(lambda row: torch.func.functional_call(model, dict(model.named_parameters()), (row[None],))[0])
    assert torch.allclose(one_by_one(x), model(x), atol=1e-5)
