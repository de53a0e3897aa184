"""Sum of gradients that are clipped for each unit (a sample, or a group of samples), without the gradients themselves.

The gradient of a linear layer for one unit is the sum over its positions of delta a^T. Here a is what enters the layer, and
delta the gradient of what leaves it. So its norm follows from the products of all pairs of positions, and one backward pass has
a and delta of all units ("ghost norms": Goodfellow 2015, arXiv:1510.01799; Li, Tramèr, Liang, Hashimoto, ICLR 2022). The
gradients of other tensors are computed for each sample by torch.func.

B samples, U units, P positions of a unit, O and I outputs and inputs of a layer; leading axes, such as devices, are allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from attune.fedclient.work.objectives.base import Batch, Loss, Network, Tensors

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


def by_sample(moving: Sequence[str]) -> Split:
    """Return the way that is right for any model: one sample after the other."""
    return Split((), tuple(moving), mapped=False)


class OtherRows(Exception):
    """Layers of these paths do not see one row for each sample of a batch."""

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__(*sorted(paths))
        self.paths = frozenset(paths)


@dataclass
class Passed:
    """Inputs and outputs of linear layers in one forward pass."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    taps: dict[str, list[Tensor]] = field(default_factory=dict)  # zeros that are added to what leaves a layer


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
    Arguments are those of `split_of`; group_B has the unit of each sample, numbers from 0, or None. Where a layer does not see
    one row for each sample, which may follow from the samples, this batch is computed sample by sample.
    """
    if len(batch.x) == 0:
        return {name: torch.zeros_like(tensors[name]) for name in moving}, tensors[moving[0]].new_zeros(())
    units = len(batch.x) if group_B is None else int(group_B.max()) + 1
    squares: list[Tensor] = []
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    single: Tensors = {}
    value: Tensor | None = None
    if split.linear:
        try:
            layers, value = passed(network, loss, tensors, beside, batch, split.linear)
        except OtherRows:
            split = by_sample(moving)
        layers = {path: (by_unit(a, group_B), by_unit(delta, group_B)) for path, (a, delta) in layers.items()}
    if layers:
        squares.append(square_norms(layers, moving))
    if split.rest:
        single, each_B = single_gradients(loss, tensors, beside, batch, split)
        value = each_B.sum() if value is None else value
        if group_B is not None:
            single = {name: g.new_zeros(units, *g.shape[1:]).index_add_(0, group_B, g) for name, g in single.items()}
        squares += [gradient.flatten(1).square().sum(dim=1) for gradient in single.values()]
    square_U = _sum(squares)
    scale_U = factors(square_U, clip)
    sums = weighted(_finite(layers, square_U), scale_U, moving)
    if not square_U.isfinite().all():
        single = {name: g.where(square_U.isfinite().view(-1, *[1] * (g.dim() - 1)), 0.0) for name, g in single.items()}
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
def recording(
    network: Network, paths: Sequence[str], rows: int, taps: Mapping[str, Sequence[Tensor]] | None = None
) -> Iterator[Passed]:
    """Record what enters these layers, and let their outputs be changed by taps: those given, or new ones of zeros.

    Raises:
        OtherRows: At the end, if a layer was called with another number of rows.
    """
    record, handles, others = Passed(), [], set[str]()

    def hook(path: str) -> Any:
        def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if any(tensor.dim() < 2 or len(tensor) != rows for tensor in (*inputs[:1], output)) or not inputs:
                others.add(path)
                return output
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
    if others:
        raise OtherRows(others)


def passed(
    network: Network, loss: Loss, tensors: Tensors, beside: Tensors, batch: Batch, paths: Sequence[str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Return (a (B, P, I), delta (B, P, O)) of each layer, and the loss. Each call of a layer gives positions of its own.

    Raises:
        OtherRows: A layer does not see one row for each sample.
    """
    fixed = {name: tensor.detach() for name, tensor in tensors.items()}
    with recording(network, paths, len(batch.x)) as record:
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


def single_gradients(loss: Loss, tensors: Tensors, beside: Tensors, batch: Batch, split: Split) -> tuple[Tensors, Tensor]:
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
        # A sample for which the model uses none of the tensors must not fail.
        used = value if value.requires_grad else value + 0 * next(iter(leaves.values())).sum()
        rows.append(torch.autograd.grad(used, list(leaves.values()), materialize_grads=True))
        losses.append(value.detach())
    return {name: torch.stack(column) for name, column in zip(leaves, zip(*rows, strict=True), strict=True)}, torch.stack(
        losses
    )
