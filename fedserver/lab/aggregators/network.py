"""The hypernetwork's own weights: an MLP over embeddings and one linear head per block of the model.

Shapes: S clients, E numbers of an embedding, H hidden units, R generated weights of one head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import relu

from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.fedserver.lab.aggregators.base import Tensors

SPREAD = 0.1  # how far a client's first weights are from the initial ones, in standard deviations of the layer
PROBES = 256


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
