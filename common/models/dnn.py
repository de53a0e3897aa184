"""Fully connected networks on flattened samples: with ReLU (FedMCSA's DNN), and with one layer (its MLR)."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from attune.common.models.blocks import ColumnEmbeddings
from attune.common.models.options import DnnOptions, MlrOptions
from attune.common.plan import ModelSpec


def make_dnn(spec: ModelSpec, options: DnnOptions) -> nn.Sequential:
    """Return a network (B, any shape) -> logits (B, classes) with the layers hidden0, hidden1, ... and head.

    Features of a table that are indices are embedded first, by the layer `embed`.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = prod(spec.shape)
    if spec.embedded:
        embed = layers["embed"] = ColumnEmbeddings(width, spec.embedded)
        width = embed.width
    for position, hidden in enumerate(options.hidden):
        layers[f"hidden{position}"] = nn.Linear(width, hidden)
        layers[f"relu{position}"] = nn.ReLU()
        width = hidden
    layers["head"] = nn.Linear(width, spec.classes)
    return nn.Sequential(layers)


def make_mlr(spec: ModelSpec, options: MlrOptions) -> nn.Sequential:
    """Return multinomial logistic regression (B, any shape) -> logits (B, classes) with one linear layer, `head`."""
    return make_dnn(spec, DnnOptions(hidden=[]))
