"""The ConvNets: the papers' shapes, images of any size, and running statistics through training and aggregation."""

import numpy as np
import pytest
import torch
from torch.func import functional_call

from attune.common.models import registry
from attune.common.models.convnet import BatchNorm
from attune.common.models.structure import components, roles, tensors_of
from attune.fedclient.work.measures import mean_cross_entropy


def build(name: str, shape: tuple[int, int, int], **options: object) -> torch.nn.Module:
    return registry.build(registry.default_spec("images", shape, 10, 0, name, options), 0)


def test_the_papers_sizes():
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(build("convnet", (32, 32, 3))).items()}
    assert [shapes[f"{name}.weight"] for name in ("conv0", "conv1", "hidden2", "hidden3", "head")] == [
        (16, 3, 5, 5), (32, 16, 5, 5), (120, 32 * 5 * 5), (84, 120), (10, 84)
    ]  # fmt: skip
    by_hand = 16 * 76 + 32 * 401 + 120 * 801 + 84 * 121 + 10 * 85
    assert sum(map(torch.numel, tensors_of(build("convnet", (32, 32, 3))).values())) == by_hand


def test_the_first_convolution_by_hand():
    model = build("convnet", (17, 16, 2)).double()
    x = torch.randn(1, 2, 17, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, bias, image = model.conv0.weight.detach().numpy(), model.conv0.bias.detach().numpy(), x[0].numpy()
    conv = np.array(
        [
            [[(weight[f] * image[:, i : i + 5, j : j + 5]).sum() + bias[f] for j in range(12)] for i in range(13)]
            for f in range(16)
        ]
    ).clip(min=0)
    pooled = np.array(
        [[[conv[f, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max() for j in range(6)] for i in range(7)] for f in range(16)]
    )
    assert np.abs(model[:3](x)[0].detach().numpy() - pooled).max() < 1e-12  # 13 rows pool to 7: the last window has one


def test_a_series_is_convolved_along_its_steps_by_hand():
    spec = registry.default_spec("series", (17, 3), 10, 0, "convnet", {})
    model = registry.build(spec, 0).double()
    x = torch.randn(1, 17, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, bias, series = model.conv0.weight.detach().numpy(), model.conv0.bias.detach().numpy(), x[0].numpy().T
    conv = np.array([[(weight[f] * series[:, t : t + 5]).sum() + bias[f] for t in range(13)] for f in range(16)]).clip(min=0)
    pooled = np.array([[conv[f, 2 * t : 2 * t + 2].max() for t in range(7)] for f in range(16)])
    assert np.abs(model[:4](x)[0].detach().numpy() - pooled).max() < 1e-12
    assert model(x).shape == (1, 10)


@pytest.mark.parametrize("name", ["convnet", "convnet-bn"])
@pytest.mark.parametrize("steps", [1, 2, 5, 15, 16, 17, 40])
def test_any_number_of_steps(name, steps):
    spec = registry.default_spec("series", (steps, 3), 4, 0, name, {})
    assert registry.build(spec, 0)(torch.rand(2, steps, 3)).shape == (2, 4)


@pytest.mark.parametrize("name", ["convnet", "convnet-bn"])
@pytest.mark.parametrize("height", [1, 2, 5, 8, 15, 16, 17, 18, 19, 28, 33])
def test_any_side(name, height):
    for width in (1, 16, 31):
        assert build(name, (height, width, 1), hidden=[3], channels=[2, 2])(torch.rand(2, 1, height, width)).shape == (2, 10)


def test_norms_and_their_statistics_have_the_role():
    model = build("convnet-bn", (8, 8, 1))
    layers = {name.rpartition(".")[0] for name, has in roles(model).items() if "norm" in has}
    assert layers == {"norm0", "norm1", "norm2", "norm3"}
    own = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert {name for name, has in roles(model).items() if "norm" in has} == {f"{layer}.{p}" for layer in layers for p in own}
    assert components(model)["norm0"] == ["norm0.weight", "norm0.bias"] and components(model)["conv0"] == ["conv0.weight"]
    order = [name for name, _ in model.named_children()]
    assert order[:4] == ["conv0", "norm0", "relu0", "pool0"] and order[-4:] == ["hidden3", "norm3", "relu3", "head"]


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 2, 2)])
def test_batch_norm_by_hand(shape):
    layer = BatchNorm(3).double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 + 1
    columns = x.movedim(1, -1).reshape(-1, 3).numpy()
    out = layer(x).detach().movedim(1, -1).reshape(-1, 3).numpy()
    assert np.abs(out - (columns - columns.mean(0)) / np.sqrt(columns.var(0) + 1e-5)).max() < 1e-12
    assert np.abs(layer.running_mean.numpy() - 0.1 * columns.mean(0)).max() < 1e-12
    assert np.abs(layer.running_var.numpy() - (0.9 + 0.1 * columns.var(0, ddof=1))).max() < 1e-12
    assert layer.num_batches_tracked.item() == 1


def test_a_batch_of_one_sample_is_normalised_as_in_prediction():
    model = build("convnet-bn", (8, 8, 1))
    model(torch.rand(6, 1, 8, 8))
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    one = torch.rand(1, 1, 8, 8)
    trained = model(one)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model).items())
    mean_cross_entropy(trained, torch.tensor([3])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    assert torch.equal(trained, model(one))


def test_running_statistics_are_explicit_in_a_functional_call():
    """Compute as a trainer does: statistics given by name change in place, and the module's own do not."""
    model = build("convnet-bn", (8, 8, 1))
    own = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    given = {name: tensor.clone() for name, tensor in own.items()}
    x = torch.rand(6, 1, 8, 8)
    expected = model.norm0.running_mean * 0.9 + 0.1 * model.conv0(x).mean((0, 2, 3))
    functional_call(model, given, (x,))
    assert torch.allclose(given["norm0.running_mean"], expected, atol=1e-6)
    assert [given[f"norm{i}.num_batches_tracked"].item() for i in range(4)] == [1] * 4
    assert given["norm0.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(tensor, own[name]) for name, tensor in tensors_of(model).items())
