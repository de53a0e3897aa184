"""Multinomial logistic regression on flattened samples (FedMCSA's MLR)."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from attune.common.models.options import MlrOptions
from attune.common.plan import ModelSpec


def make_mlr(spec: ModelSpec, options: MlrOptions) -> nn.Sequential:
    """Return a network (B, any shape) -> logits (B, classes) with one linear layer, `head`."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=nn.Linear(prod(spec.shape), spec.classes)))
