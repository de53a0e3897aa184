"""A model with BatchNorm, for tests of what may be shared."""

from collections import OrderedDict

from torch import nn

from attune.common.plan import ModelSpec


def normalised(spec: ModelSpec) -> nn.Module:
    layers = {"norm": nn.BatchNorm1d(spec.shape[0]), "head": nn.Linear(spec.shape[0], spec.classes)}
    return nn.Sequential(OrderedDict(layers))
