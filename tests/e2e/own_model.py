"""A model in the operator's own code, for tests of permissions: both sides find it as attune.tests.e2e.own_model."""

from math import prod

from torch import nn

from attune.common.plan import ModelSpec


def tiny(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(spec.shape), spec.classes))
