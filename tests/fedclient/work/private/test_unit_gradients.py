"""Norms and sums of clipped gradients against autograd, one sample after the other, in float64."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attune.fedclient.work.measures import MEASURES
from attune.fedclient.work.objectives.base import Batch, Network
from attune.fedclient.work.private.model_trial import split_of
from attune.fedclient.work.private.unit_gradients import clipped_layers, clipped_sum


class Sequences(nn.Module):
    """Attention whose projections are linear, a normalisation, and a class token: linear layers over positions, and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        self.qkv, self.out, self.norm, self.head = nn.Linear(5, 15), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 5), x], dim=1)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.head(self.norm(x + self.out(mixed))[:, 0])


class Twice(nn.Module):
    """A layer that is called twice, and one whose weight is used in another way too."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        return self.head(torch.tanh(self.tied(x)) @ self.tied.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 6), act=nn.ReLU(inplace=True), head=nn.Linear(6, 3)))


def images() -> nn.Module:
    layers = OrderedDict(conv=nn.Conv2d(1, 2, 3), act=nn.ReLU(), flat=nn.Flatten(), head=nn.Linear(8, 3))
    return nn.Sequential(layers)


def mean_loss(network: Network) -> Callable[..., Tensor]:
    def loss(tensors: dict[str, Tensor], _: dict[str, Tensor], batch: Batch) -> Tensor:
        return MEASURES["classes"].loss(network(tensors, batch.x), batch.y, batch.weight)

    return loss


CASES = [
    (mlp, (4,), ("body", "head"), 0),
    (Sequences, (3, 5), ("qkv", "out", "head"), 3),
    (Twice, (4,), ("again", "head"), 2),
    (images, (1, 4, 4), ("head",), 2),
    (Recurrent, (6, 5), ("head",), 4),
]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("model", "shape", "linear", "rest"), CASES)
def test_norms_and_sums_are_those_of_single_units_by_autograd(
    model: Callable[[], nn.Module], shape: tuple[int, ...], linear: tuple[str, ...], rest: int, grouped: bool
) -> None:
    torch.manual_seed(0)
    module = model().double()
    network, count = Network(module), 7
    x, y = torch.randn(count, *shape, dtype=torch.float64), torch.arange(count) % 3
    x[3] *= 20  # some gradients are clipped, and others are not
    group_B = torch.tensor([1, 0, 2, 1, 0, 1, 3]) if grouped else None
    tensors = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    moving, loss = tuple(tensors), mean_loss(network)
    split = split_of(network, loss, tensors, {}, moving, Batch(x, y))
    assert (split.linear, len(split.rest)) == (linear, rest)

    rows = []
    for at in range(count):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        value = cross_entropy(torch.func.functional_call(module, leaves, (x[at : at + 1].clone(),)), y[at : at + 1])
        rows.append(dict(zip(moving, torch.autograd.grad(value, list(leaves.values())), strict=True)))
    units = [[at for at in range(count) if (group_B is None and at == unit) or (group_B is not None and group_B[at] == unit)]
             for unit in range(4 if grouped else count)]  # fmt: skip
    gradients = [{name: sum(rows[at][name] for at in unit) for name in moving} for unit in units]
    norms = [torch.stack([g.square().sum() for g in one.values()]).sum().sqrt() for one in gradients]
    clip = float(sorted(norms)[len(norms) // 2])
    assert min(norms) < clip < max(norms)
    sums, _ = clipped_sum(network, loss, tensors, {}, moving, Batch(x, y), clip, group_B, split)
    for name in moving:
        wanted = sum(one[name] * min(1.0, clip / norm) for one, norm in zip(gradients, norms, strict=True))
        assert torch.allclose(sums[name], wanted, rtol=1e-9, atol=1e-12), name
    for at in range(1, count + 1):  # one sample more moves the sum by at most the norm
        less, _ = clipped_sum(network, loss, tensors, {}, moving, Batch(x[:at], y[:at]), clip / 9, None, split)
        more, _ = clipped_sum(network, loss, tensors, {}, moving, Batch(x[: at - 1], y[: at - 1]), clip / 9, None, split)
        moved = torch.stack([(less[name] - more[name]).square().sum() for name in moving]).sum().sqrt()
        assert moved <= clip / 9 * (1 + 1e-9)


@pytest.mark.parametrize("served", [0.0, 3e38])
def test_the_way_to_the_norms_follows_from_no_served_weights(served: float) -> None:
    """With weights that overflow or give no gradient a trial shows nothing, and the server chooses them."""
    for model, shape, linear, rest in CASES:
        network, draws = Network(model()), torch.Generator().manual_seed(0)
        tensors = {name: torch.full_like(tensor, served).detach() for name, tensor in network.model.named_parameters()}
        some = Batch(torch.randn(4, *shape, generator=draws), torch.arange(4) % 3)
        split = split_of(network, mean_loss(network), tensors, {}, tuple(tensors), some)
        assert (split.linear, len(split.rest)) == (linear, rest)


def test_with_dropout_one_pass_has_norms_and_gradients() -> None:
    linear = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), drop=nn.Dropout(0.5), head=nn.Linear(6, 3)))
    mixed = nn.Sequential(OrderedDict(body=nn.Linear(4, 6), norm=nn.LayerNorm(6), drop=nn.Dropout(0.5), head=nn.Linear(6, 3)))
    for module, paths in ((linear, ("body", "head")), (mixed, ())):
        network = Network(module)
        tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
        some = Batch(torch.randn(4, 4), torch.zeros(4).long())
        split = split_of(network, mean_loss(network), tensors, {}, tuple(tensors), some)
        assert (split.linear, split.mapped) == (paths, True)
        sums, _ = clipped_sum(network, mean_loss(network), tensors, {}, tuple(tensors), some, 0.01, None, split)
        assert torch.stack([total.square().sum() for total in sums.values()]).sum().sqrt() <= 0.04 * (1 + 1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("model", [mlp, images])
def test_a_unit_whose_gradient_is_not_finite_counts_as_zero(model: Callable[[], nn.Module], grouped: bool) -> None:
    """An order that failed for it would tell the server, which chooses the weights, that the device has such a sample."""
    torch.manual_seed(0)
    module = model()
    network, shape = Network(module), (4,) if model is mlp else (1, 4, 4)
    x, y = torch.randn(5, *shape), torch.arange(5) % 3
    tensors = {name: 100 * tensor.detach() for name, tensor in module.named_parameters()}
    moving, loss = tuple(tensors), mean_loss(network)
    split = split_of(network, loss, tensors, {}, moving, Batch(x, y))
    group_B = torch.tensor([0, 1, 1, 2, 2]) if grouped else None
    without = torch.tensor([0, 3, 4]) if grouped else torch.tensor([0, 2, 3, 4])
    left = torch.tensor([0, 1, 1]) if grouped else None
    wanted, _ = clipped_sum(network, loss, tensors, {}, moving, Batch(x[without], y[without]), 0.1, left, split)
    x[1] = 1e38  # the scores are too large for float32
    sums, _ = clipped_sum(network, loss, tensors, {}, moving, Batch(x, y), 0.1, group_B, split)
    for name in moving:
        assert torch.allclose(sums[name], wanted[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("positions", "inputs"), [(2, 64), (80, 8)])  # by products of pairs, and by the gradient itself
@pytest.mark.parametrize("moving", ["layer.weight", "layer.bias"])
def test_positions_that_nearly_cancel_hide_no_norm(positions: int, inputs: int, moving: str) -> None:
    """In float32 the norm of a sum of large opposite terms is lost, and the server chooses how large they are."""
    draws = torch.Generator().manual_seed(0)
    for size in (1e3, 1e5):
        a = size * torch.randn(8, 1, inputs, generator=draws).expand(8, positions, inputs)
        a = a + size * 1e-4 * torch.randn(8, positions, inputs, generator=draws)
        delta = size * torch.randn(8, 1, 64, generator=draws) * torch.tensor([1.0, -1.0]).repeat(positions // 2)[:, None]
        delta = delta + size * 1e-4 * torch.randn(8, positions, 64, generator=draws)
        for unit in range(8):
            [total] = clipped_layers({"layer": (a[unit, None], delta[unit, None])}, [moving], 1.0).values()
            assert total.norm() <= 1 + 1e-3
