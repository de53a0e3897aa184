"""Sum of gradients that are clipped for each unit (a sample, or a group of samples), without the gradients themselves.

The gradient of a linear layer for one unit is the sum over its positions of delta a^T. Here a is what enters the layer, and
delta the gradient of what leaves it. So its norm follows from the products of all pairs of positions, and one backward pass has
a and delta of all units ("ghost norms": Goodfellow 2015, arXiv:1510.01799; Li, Tramèr, Liang, Hashimoto, ICLR 2022). The
gradients of other tensors are computed for each sample by torch.func.

B samples, U units, P positions of a unit, O and I outputs and inputs of a layer; leading axes, such as devices, are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.dropout import _DropoutNd

from attune.common.errors import SettingError
from attune.fedclient.work.objectives.base import Batch, Loss, Tensors
from attune.fedclient.work.objectives.network import Network

PROBED = 3  # samples of the trial
ROUNDING = 32.0  # of a sum of products, in units of the last place of the largest sum there could be
AT_ONCE_BYTES = 256 << 20  # of the gradients of single samples


@dataclass(frozen=True)
class Split:
    """How the gradients of the moving tensors are computed.

    Attributes:
        linear: Paths of the linear layers whose norms follow from what enters and leaves them.
        rest: The tensors whose gradients are computed sample by sample.
        mapped: torch.func can compute them for many samples at once.
    """

    linear: tuple[str, ...]
    rest: tuple[str, ...]
    mapped: bool = True


@dataclass
class Passed:
    """Inputs and outputs of linear layers in one forward pass."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    taps: dict[str, list[Tensor]] = field(default_factory=dict)  # zeros that are added to what leaves a layer


_splits: WeakKeyDictionary[Network, dict[tuple[str, ...], Split]] = WeakKeyDictionary()


def split_of(network: Network, loss: Loss, tensors: Tensors, beside: Tensors, moving: Sequence[str], batch: Batch) -> Split:
    """Find out by a trial how the gradients are computed; it is remembered for the network.

    Args:
        network: The network.
        loss: A sum over samples, by their weights.
        tensors: The model's tensors.
        beside: What else the loss needs.
        moving: The tensors that are trained.
        batch: A few samples, of which the trial's shapes are taken.

    Raises:
        SettingError: The scores of a sample depend on the other samples of its batch.
    """
    known = _splits.setdefault(network, {})
    if tuple(moving) not in known:
        known[tuple(moving)] = _tried(network, loss, tensors, beside, moving, batch)
    return known[tuple(moving)]


def clipped_sum(
    network: Network,
    loss: Loss,
    tensors: Tensors,
    beside: Tensors,
    moving: Sequence[str],
    batch: Batch,
    clip: float,
    group_B: Tensor | None,
    split: Split,
) -> tuple[Tensors, Tensor]:
    """Return the sum over units of their gradients, each scaled down to the norm `clip`, and the sum of the losses.

    A gradient that is not finite counts as zero: an error would tell who chooses the weights that there is such a sample.
    Arguments are those of `split_of`; group_B has the unit of each sample, numbers from 0, or None.
    """
    if len(batch.x) == 0:
        return {name: torch.zeros_like(tensors[name]) for name in moving}, tensors[moving[0]].new_zeros(())
    units = len(batch.x) if group_B is None else int(group_B.max()) + 1
    squares: list[Tensor] = []
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    single: Tensors = {}
    value: Tensor | None = None
    if split.linear:
        layers, value = _passed(network, loss, tensors, beside, batch, split.linear)
        layers = {path: (by_unit(a, group_B), by_unit(delta, group_B)) for path, (a, delta) in layers.items()}
        squares.append(square_norms(layers, moving))
    if split.rest:
        single, each_B = _single(loss, tensors, beside, batch, split)
        value = each_B.sum() if value is None else value
        if group_B is not None:
            single = {name: g.new_zeros(units, *g.shape[1:]).index_add_(0, group_B, g) for name, g in single.items()}
        squares += [gradient.flatten(1).square().sum(dim=1) for gradient in single.values()]
    square_U = _sum(squares)
    scale_U = factors(square_U, clip)
    sums = weighted(_finite(layers, square_U), scale_U, moving)
    if not square_U.isfinite().all():
        single = {name: torch.where(_shaped(square_U.isfinite(), g), g, 0.0) for name, g in single.items()}
    sums |= {name: torch.tensordot(scale_U, gradient, dims=1) for name, gradient in single.items()}
    none = {name: torch.zeros_like(tensors[name]) for name in moving if name not in sums}
    return {**sums, **none}, (value if value is not None else scale_U.sum()).detach()


def factors(square_U: Tensor, clip: float) -> Tensor:
    """Return the factor of each unit with which its gradient has at most the norm `clip`; 0 if it is not finite."""
    scale_U = square_U.clamp_min(torch.finfo(square_U.dtype).tiny).rsqrt_().mul_(clip).clamp_(max=1.0)
    return torch.where(square_U.isfinite(), scale_U, 0.0)


def clipped_layers(layers: Mapping[str, tuple[Tensor, Tensor]], moving: Sequence[str], clip: float) -> Tensors:
    """Return the sums of clipped gradients where all tensors belong to these layers. Arguments as in `square_norms`."""
    square_U = square_norms(layers, moving)
    return weighted(_finite(layers, square_U), factors(square_U, clip), moving)


def _finite(layers: Mapping[str, tuple[Tensor, Tensor]], square_U: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the layers with zeros for units whose squared norm is not finite."""
    if square_U.isfinite().all():
        return layers
    is_finite = square_U.isfinite()[..., None, None]
    return {path: (torch.where(is_finite, a, 0.0), torch.where(is_finite, delta, 0.0)) for path, (a, delta) in layers.items()}


def _shaped(value_U: Tensor, like: Tensor) -> Tensor:
    """Return (U,) as (U, 1, ...), with as many axes as `like`."""
    return value_U.view(-1, *[1] * (like.dim() - 1))


def square_norms(layers: Mapping[str, tuple[Tensor, Tensor]], moving: Sequence[str]) -> Tensor:
    """Return the squared norm of each unit's gradient over these layers, (..., U).

    Args:
        layers: (a (..., U, P, I), delta (..., U, P, O)) of each layer.
        moving: The tensors that count.
    """
    squares = []
    for path, (a, delta) in layers.items():
        weight, bias = f"{path}.weight" in moving, f"{path}.bias" in moving
        if delta.shape[-2] == 1:  # the norm of an outer product is the product of the norms
            squares.append(_square(delta) * (_square(a) + float(bias) if weight else 1.0))
            continue
        if weight:
            squares.append(_square_of_weight(a, delta))
        if bias:
            squares.append(_square(delta.sum(dim=-2, keepdim=True)))
    return _sum(squares)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


def _square(values: Tensor) -> Tensor:
    """Return the squared norms over the last two axes."""
    norms: Tensor = torch.linalg.vector_norm(values.flatten(-2), dim=-1)
    return norms.square()


def _square_of_weight(a: Tensor, delta: Tensor) -> Tensor:
    positions, inputs, outputs = a.shape[-2], a.shape[-1], delta.shape[-1]
    if positions * positions > inputs * outputs:
        return (delta.transpose(-1, -2) @ a).square().sum(dim=(-2, -1))
    pairs = (a @ a.transpose(-1, -2)) * (delta @ delta.transpose(-1, -2))
    # Where large terms cancel, rounding can take all of the square; it takes no more than this.
    sizes: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(delta, dim=-1)
    lost = ROUNDING * torch.finfo(a.dtype).eps * sizes.sum(dim=-1).square()
    return pairs.sum(dim=(-2, -1)).clamp_min(0) + lost


def weighted(layers: Mapping[str, tuple[Tensor, Tensor]], scale_U: Tensor, moving: Sequence[str]) -> Tensors:
    """Return the sums over units of `scale_U` (..., U) times their gradients, of the layers' tensors."""
    sums: Tensors = {}
    for path, (a, delta) in layers.items():
        scaled = (delta * scale_U[..., None, None]).flatten(-3, -2)
        if f"{path}.weight" in moving:
            sums[f"{path}.weight"] = scaled.transpose(-1, -2) @ a.flatten(-3, -2)
        if f"{path}.bias" in moving:
            sums[f"{path}.bias"] = scaled.sum(dim=-2)
    return sums


def by_unit(values: Tensor, group_B: Tensor | None) -> Tensor:
    """Return values (B, P, F) as (U, P', F): the positions of all samples of a unit in a row, filled up with zeros."""
    if group_B is None:
        return values
    order = torch.argsort(group_B, stable=True)
    counts = torch.bincount(group_B)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.arange(len(group_B), device=values.device) - starts[group_B[order]]
    padded = values.new_zeros(len(counts), int(counts.max()), *values.shape[1:])
    padded[group_B[order], place] = values[order]
    return padded.flatten(1, 2)


@contextmanager
def recording(network: Network, paths: Sequence[str], taps: Mapping[str, Sequence[Tensor]] | None = None) -> Iterator[Passed]:
    """Record what enters these layers, and let their outputs be changed by taps: those given, or new ones of zeros."""
    record, handles = Passed(), []

    def hook(path: str) -> Any:
        def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls = record.inputs.setdefault(path, [])
            tap = torch.zeros_like(output, requires_grad=True) if taps is None else taps[path][len(calls)]
            calls.append(inputs[0].detach())
            record.taps.setdefault(path, []).append(tap)
            return output + tap

        return watch

    try:
        for path in paths:
            handles.append(network.model.get_submodule(path).register_forward_hook(hook(path)))
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _passed(
    network: Network, loss: Loss, tensors: Tensors, beside: Tensors, batch: Batch, paths: Sequence[str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Return (a (B, P, I), delta (B, P, O)) of each layer, and the loss. Each call of a layer gives positions of its own."""
    fixed = {name: tensor.detach() for name, tensor in tensors.items()}
    with recording(network, paths) as record:
        value = loss(fixed, beside, batch._replace(weight=None)) * len(batch.x)  # the mean is faster than a weighted sum
    flat = [tap for path in paths for tap in record.taps.get(path, [])]
    deltas = iter(torch.autograd.grad(value, flat, materialize_grads=True))
    layers = {}
    for path in paths:
        calls = record.inputs.get(path, [])
        if calls:
            layers[path] = (joined(calls, 0), joined([next(deltas) for _ in calls], 0))
    return layers, value


def joined(calls: Sequence[Tensor], axes: int) -> Tensor:
    """Return (*leading, B, ..., F) of several calls of a layer as (*leading, B, P, F), where `axes` axes are leading."""
    lead = axes + 1
    positions = [call.reshape(*call.shape[:lead], -1, call.shape[-1]) for call in calls]
    return positions[0] if len(positions) == 1 else torch.cat(positions, dim=-2)


def _single(loss: Loss, tensors: Tensors, beside: Tensors, batch: Batch, split: Split) -> tuple[Tensors, Tensor]:
    """Return the gradients of the rest for each sample, (B, ...), and the losses (B,)."""
    weight_B = torch.ones(len(batch.x), dtype=tensors[split.rest[0]].dtype, device=batch.x.device)
    fixed = {name: tensor.detach() for name, tensor in tensors.items() if name not in split.rest}
    rest = {name: tensors[name].detach() for name in split.rest}

    def of(part: Tensors, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return loss({**fixed, **part}, beside, Batch(x[None], y[None], weight[None]))

    if split.mapped:
        size = max(1, AT_ONCE_BYTES // max(1, sum(tensor.nbytes for tensor in rest.values())))
        mapped = vmap(grad_and_value(of), in_dims=(None, 0, 0, 0), randomness="different", chunk_size=size)
        gradients, each_B = mapped(rest, batch.x, batch.y, weight_B)
        return gradients, each_B
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in rest.items()}
    rows, losses = [], []
    for x, y, weight in zip(batch.x, batch.y, weight_B, strict=True):
        value = of(leaves, x, y, weight)
        rows.append(torch.autograd.grad(value, list(leaves.values()), materialize_grads=True))
        losses.append(value.detach())
    return {name: torch.stack(column) for name, column in zip(leaves, zip(*rows, strict=True), strict=True)}, torch.stack(
        losses
    )


def _tried(network: Network, loss: Loss, tensors: Tensors, beside: Tensors, moving: Sequence[str], batch: Batch) -> Split:
    """Compare every way with the gradients of single samples by autograd, on weights that are drawn for it.

    They do not follow from `tensors`: the server chooses those, and could choose some that hide a difference.
    """
    count = min(PROBED, len(batch.x))
    some = Batch(batch.x[:count], batch.y[:count], torch.ones(count, dtype=tensors[moving[0]].dtype, device=batch.x.device))
    generator = torch.Generator().manual_seed(0)
    first = {name: tensor.detach().to(tensors[name]) for name, tensor in network.model.named_parameters() if name in tensors}
    drawn = {**tensors, **first}
    for name in moving:
        noise = torch.randn(tensors[name].shape, generator=generator, dtype=torch.float32)
        drawn[name] = drawn[name].detach() + 0.1 * noise.to(tensors[name])
    was_training = {module: module.training for module in network.model.modules()}
    network.model.eval()
    try:
        moving = _used(loss, drawn, beside, moving, some)
        exact, _ = _single(loss, drawn, beside, some, Split((), tuple(moving), mapped=False))
        _check_independent(network, drawn, some.x)
        paths = _ghosts(network, loss, drawn, beside, moving, some, exact)
        covered = {f"{path}.{what}" for path in paths for what in ("weight", "bias")}
        rest = tuple(name for name in moving if name not in covered)
        if rest and any(_drops(module) for module in network.model.modules()):
            # Two passes would drop other units, and the norm of one would not bound the gradient of the other.
            paths, rest = (), tuple(moving)
        return Split(paths, rest, not rest or _can_map(loss, drawn, beside, some, rest, exact))
    finally:
        for module, training in was_training.items():
            module.training = training


def _used(loss: Loss, tensors: Tensors, beside: Tensors, moving: Sequence[str], batch: Batch) -> tuple[str, ...]:
    """Return the moving tensors on which the loss depends; the others have no gradient to clip."""
    leaves = {name: tensor.detach().clone().requires_grad_(name in moving) for name, tensor in tensors.items()}
    gradients = torch.autograd.grad(loss(leaves, beside, batch), [leaves[name] for name in moving], allow_unused=True)
    return tuple(name for name, gradient in zip(moving, gradients, strict=True) if gradient is not None)


def _check_independent(network: Network, tensors: Tensors, x: Tensor) -> None:
    with torch.no_grad():
        together, single = network(tensors, x)[:1], network(tensors, x[:1])
    if len(x) > 1 and not _alike(together, single):
        raise SettingError(
            f"the scores of a sample by the model {type(network.model).__name__} depend on the other samples of its batch: "
            "with privacy.unit each sample must be scored by itself; take another model"
        )


def _ghosts(
    network: Network,
    loss: Loss,
    tensors: Tensors,
    beside: Tensors,
    moving: Sequence[str],
    batch: Batch,
    exact: Tensors,
) -> tuple[str, ...]:
    """Return the paths of the linear layers whose gradients follow from what enters and leaves them."""
    paths = [
        name for name, module in network.model.named_modules() if isinstance(module, nn.Linear) and f"{name}.weight" in moving
    ]
    try:
        layers, _ = _passed(network, loss, tensors, beside, batch, paths)
    except (RuntimeError, ValueError):
        return ()
    right = []
    for path, (a, delta) in layers.items():
        alone = {f"{path}.weight": delta.transpose(-1, -2) @ a, f"{path}.bias": delta.sum(dim=-2)}
        if all(alone[name].shape == exact[name].shape and _alike(alone[name], exact[name]) for name in alone if name in exact):
            right.append(path)
    return tuple(right)


def _can_map(loss: Loss, tensors: Tensors, beside: Tensors, batch: Batch, rest: tuple[str, ...], exact: Tensors) -> bool:
    try:
        gradients, _ = _single(loss, tensors, beside, batch, Split((), rest))
    except Exception:
        return False  # torch.func has no rule for some layer, and says so in many ways: such samples go one by one
    return all(_alike(gradients[name], exact[name]) for name in rest)


def _drops(module: nn.Module) -> bool:
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, int | float) and share > 0


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
