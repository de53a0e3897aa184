"""The hypernetwork: an MLP over embeddings and one linear head per block of the model. The server has it, or each device too.

Shapes: S clients, E numbers of an embedding, H hidden units, R generated weights of one head.

Its optimisers work in place, for dense gradients and for gradients known only as an outer product of rank S. The gradient of a
head is G_SR^T F_SH; a whole one would be as large as the head itself, so it is never made. Both give what torch.optim gives.
`moments` names the running tensors, of the parameter's own shape and starting at zero, that each step is given. `dense_` takes
step number `step` (from 1) on `value` and its moments, in place; `outer_` takes the same step for the gradient G_SR^T F_SH.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import relu

from attune.common.errors import SettingError
from attune.common.methods.ridge import GAMMA, WEIGHT, sizes_of, sums_manifest
from attune.common.methods.settings.aggregators import AggregatorSettings, ClosedFormSettings, HypernetworkSettings
from attune.common.wire.header import Manifest, TensorSpec, layout_of
from attune.common.wire.tensors import Tensors, manifest_of

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class ServerSgd:
    """SGD with momentum and weight decay; an outer product is added straight into momentum or weight."""

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self._lr, self._momentum, self._decay = lr, momentum, weight_decay
        self.moments: tuple[str, ...] = ("momentum",) if momentum else ()

    def dense_(self, value: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        if not moments:
            value.mul_(1 - self._lr * self._decay).add_(gradient, alpha=-self._lr)
            return
        moments[0].mul_(self._momentum).add_(gradient).add_(value, alpha=self._decay)
        value.add_(moments[0], alpha=-self._lr)

    def outer_(
        self, W_RH: torch.Tensor, G_SR: torch.Tensor, F_SH: torch.Tensor, moments: Sequence[torch.Tensor], step: int
    ) -> None:
        if not moments:
            W_RH.addmm_(G_SR.T, F_SH, beta=1 - self._lr * self._decay, alpha=-self._lr)
            return
        moments[0].addmm_(G_SR.T, F_SH, beta=self._momentum).add_(W_RH, alpha=self._decay)
        W_RH.add_(moments[0], alpha=-self._lr)


class ServerAdam:
    """Adam, weight decay added to the gradient. Squares are elementwise, so call `outer_` on a block of rows at a time."""

    moments: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def __init__(self, lr: float, weight_decay: float) -> None:
        self._lr, self._decay = lr, weight_decay

    def dense_(self, value: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        self._apply_(value, gradient.clone(), moments, step)

    def outer_(
        self, W_RH: torch.Tensor, G_SR: torch.Tensor, F_SH: torch.Tensor, moments: Sequence[torch.Tensor], step: int
    ) -> None:
        self._apply_(W_RH, G_SR.T @ F_SH, moments, step)

    def _apply_(self, value: torch.Tensor, scratch: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        """Apply Adam's step. `scratch` holds the gradient and is overwritten."""
        first, second = moments
        if self._decay:
            scratch.add_(value, alpha=self._decay)
        first.lerp_(scratch, 1 - BETA1)
        second.mul_(BETA2).addcmul_(scratch, scratch, value=1 - BETA2)
        torch.sqrt(second, out=scratch)
        scratch.div_(math.sqrt(1 - BETA2**step)).add_(EPSILON)
        value.addcdiv_(first, scratch, value=-self._lr / (1 - BETA1**step))


Optimiser = ServerSgd | ServerAdam


def optimiser_of(settings: HypernetworkSettings) -> Optimiser:
    """Return the optimiser that the settings name."""
    if settings.server_optimiser == "adam":
        return ServerAdam(settings.lr, settings.weight_decay)
    return ServerSgd(settings.lr, settings.server_momentum, settings.weight_decay)


SPREAD = 0.1  # how far a client's first weights are from the initial ones, in standard deviations of the layer
PROBES = 256
FORWARD_ROWS = 8  # rows of every forward pass, so that a client's weights do not depend on the other clients in it
WIRE = "phi/"  # before the names of the hypernetwork's tensors in blobs; no tensor of a model has a slash in its name


@dataclass(frozen=True)
class Head:
    """One head emits these tensors, flattened one after another: `names[k]` has `sizes[k]` of its rows."""

    group: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def weight(self) -> str:
        return f"head.{self.group}.weight"

    @property
    def bias(self) -> str:
        return f"head.{self.group}.bias"

    def split(self, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name and the view of its rows."""
        return zip(self.names, torch.split(rows, list(self.sizes)), strict=True)

    def within(self, start: int, end: int, rows: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield for the rows [start, end): each tensor's name, the view of its rows, and the number of its first row there."""
        offset = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            first, last = max(start, offset), min(end, offset + size)
            if first < last:
                yield name, rows[first - start : last - start], first - offset
            offset += size


def heads_of(initial: Mapping[str, torch.Tensor], components: Mapping[str, list[str]]) -> list[Head]:
    """Return one head per block, if a tensor's path has a numbered module (`blocks.3.` or `block3.`), else per component."""
    groups: dict[str, list[str]] = {}
    for component, names in components.items():
        for name in names:
            groups.setdefault(_block_of(name) or component, []).append(name)
    return [Head(group, tuple(names), tuple(initial[name].numel() for name in names)) for group, names in groups.items()]


def _block_of(name: str) -> str:
    """Return the path down to the first numbered module; empty without one."""
    path = name.split(".")[:-1]
    for depth, module in enumerate(path, start=1):
        if module[-1:].isdigit():
            return ".".join(path[:depth])
    return ""


def initialise(
    settings: HypernetworkSettings, heads: list[Head], initial: Mapping[str, torch.Tensor], dtype: torch.dtype, seed: int
) -> Tensors:
    """Return fresh weights: generated tensors are the model's initial ones plus a tenth of their standard deviation.

    A head's bias is the initial tensor and its weights are N(0, (SPREAD * s / f)^2), with s the standard deviation of that
    tensor and f the root mean square norm of the MLP's output. So a generated layer has sqrt(1 + SPREAD^2) = 1.005 times the
    layer's own scale, for any width, hidden size, depth and initialisation of the MLP. With "he" (He, Zhang, Ren, Sun: Delving
    Deep into Rectifiers, ICCV 2015, equation 10) f^2 is about the hidden size. Then a step of plain SGD moves what one client
    is served more than what all are, because the biases of the heads count as one more feature of size 1.
    """
    draw = torch.Generator().manual_seed(seed)
    network: Tensors = {}
    inputs = settings.embedding_dim
    for k in range(settings.layers):
        weight_HI, bias_H = torch.empty(settings.hidden, inputs, dtype=dtype), torch.zeros(settings.hidden, dtype=dtype)
        if settings.mlp_initialisation == "he":
            weight_HI.normal_(0, math.sqrt((2 if k else 1) / inputs), generator=draw)  # half of what a ReLU gives is 0
        else:
            bound = 1 / math.sqrt(inputs)
            weight_HI.uniform_(-bound, bound, generator=draw)
            bias_H.uniform_(-bound, bound, generator=draw)
        network[f"mlp.{k}.weight"], network[f"mlp.{k}.bias"] = weight_HI, bias_H
        inputs = settings.hidden
    probes_SE = torch.empty(PROBES, settings.embedding_dim, dtype=dtype).normal_(generator=draw)
    norm = float(features(network, probes_SE).square().sum(dim=1).mean().sqrt())
    for head in heads:
        weight_RH = torch.empty(sum(head.sizes), settings.hidden, dtype=dtype)
        for name, rows_RH in head.split(weight_RH):
            scale = float(initial[name].double().std(correction=0)) if initial[name].numel() else 0.0
            rows_RH.normal_(0, SPREAD * scale / norm, generator=draw)
        network[head.weight] = weight_RH
        network[head.bias] = torch.cat([initial[name].reshape(-1).to(dtype) for name in head.names])
    return network


def features(network: Mapping[str, torch.Tensor], z_SE: torch.Tensor) -> torch.Tensor:
    """Return the MLP's output (S, H): Linear, then ReLU and Linear for every further layer."""
    hidden_SH = affine(z_SE, network["mlp.0.weight"], network["mlp.0.bias"])
    k = 1
    while f"mlp.{k}.weight" in network:
        hidden_SH = affine(relu(hidden_SH), network[f"mlp.{k}.weight"], network[f"mlp.{k}.bias"])
        k += 1
    return hidden_SH


def affine(x_SI: torch.Tensor, W_RI: torch.Tensor, b_R: torch.Tensor) -> torch.Tensor:
    """Return x W^T + b, (S, R), as the transpose of W x^T + b.

    In this order a client's result has the same bits in every column and beside all other clients (for 8 columns, in float32
    and float64; tried with MKL, where x W^T depends on the place).
    """
    return torch.addmm(b_R.unsqueeze(1), W_RI, x_SI.T).T


def generated(
    network: Mapping[str, torch.Tensor], heads: Sequence[Head], initial: Mapping[str, torch.Tensor], z_SE: torch.Tensor
) -> list[Tensors]:
    """Return W of each embedding, at most FORWARD_ROWS of them, on the CPU. `initial` gives dtypes and shapes."""
    F_SH = features(network, torch.cat([z_SE, z_SE[:1].expand(FORWARD_ROWS - len(z_SE), -1)]))
    W_SR: Tensors = {}
    for head in heads:
        weight_RH, bias_R = network[head.weight], network[head.bias]
        emitted_SR = affine(F_SH.to(weight_RH.device), weight_RH, bias_R).cpu()
        W_SR.update(zip(head.names, torch.split(emitted_SR, list(head.sizes), dim=1), strict=True))
    return [{name: W_SR[name][i].view(like.shape).to(like.dtype) for name, like in initial.items()} for i in range(len(z_SE))]


def gradients(
    network: Mapping[str, torch.Tensor], heads: Sequence[Head], z_E: torch.Tensor, change: Mapping[str, torch.Tensor]
) -> tuple[Tensors, torch.Tensor]:
    """Return the gradients of <W, -Delta> in the hypernetwork's weights, and in one client's embedding (E).

    This is the client's term of FedTP eq. 7-10 (signs as in errata E2), without its share of the samples.

    Args:
        network: The hypernetwork's weights.
        heads: Its heads.
        z_E: The embedding with which W was generated.
        change: Delta, how training changed the generated tensors.
    """
    result: Tensors = {}
    mlp = {name: tensor.detach().requires_grad_() for name, tensor in network.items() if name.startswith("mlp.")}
    z_1E = z_E[None].detach().requires_grad_()
    with torch.enable_grad():
        F_1H = features(mlp, z_1E)
    slope_1H = torch.zeros_like(F_1H)
    for head in heads:
        G_R = -torch.cat([change[name].reshape(-1) for name in head.names]).to(F_1H.dtype)
        result[head.weight], result[head.bias] = torch.outer(G_R, F_1H.detach()[0]), G_R
        slope_1H += G_R @ network[head.weight]
    dz_1E, *of_mlp = torch.autograd.grad(F_1H, [z_1E, *mlp.values()], slope_1H)
    return result | dict(zip(mlp, of_mlp, strict=True)), dz_1E[0]


def computes_in(initial: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype in which the hypernetwork computes: float32, or float64 if the model does."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in initial.values()) else torch.float32


def on_wire(network: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the hypernetwork's tensors under their names in blobs."""
    return {f"{WIRE}{name}": tensor for name, tensor in network.items()}


def off_wire(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the hypernetwork's tensors under their own names."""
    return {name.removeprefix(WIRE): tensor for name, tensor in tensors.items()}


def travelling(
    settings: AggregatorSettings, values: Mapping[str, torch.Tensor], components: Mapping[str, list[str]]
) -> Manifest:
    """Return what a device hands in of a part: its tensors, sums, or the hypernetwork from which it generates them.

    Args:
        settings: Of the part's aggregator.
        values: The part's tensors in the model.
        components: For each component of the model the names of its tensors in the part.

    Raises:
        SettingError: The hypernetwork is larger than the settings allow.
    """
    if isinstance(settings, ClosedFormSettings):
        return sums_manifest(len(values[WEIGHT]), sizes_of(values), one_sum=GAMMA in values)
    if not isinstance(settings, HypernetworkSettings) or not settings.on_device:
        return manifest_of(values)
    dtype = "F64" if computes_in(values) == torch.float64 else "F32"
    shapes: dict[str, tuple[int, ...]] = {}
    inputs = settings.embedding_dim
    for k in range(settings.layers):
        shapes |= {f"mlp.{k}.weight": (settings.hidden, inputs), f"mlp.{k}.bias": (settings.hidden,)}
        inputs = settings.hidden
    for head in heads_of(values, components):
        shapes |= {head.weight: (sum(head.sizes), settings.hidden), head.bias: (sum(head.sizes),)}
    manifest = {f"{WIRE}{name}": TensorSpec(dtype, shape) for name, shape in shapes.items()}
    if (size := layout_of(manifest).size) > settings.device_bytes:
        count = sum(tensor.numel() for tensor in values.values())
        raise SettingError(
            f'method.embedding = "device" sends the hypernetwork to devices, and its gradient back: {size:,} bytes each way '
            f"in each round, for {count:,} generated numbers. At most {settings.device_bytes:,} are allowed "
            "(method.device_bytes). Generate less, such as adapters; make method.hidden smaller; or take "
            'method.embedding = "trained"'
        )
    return manifest
