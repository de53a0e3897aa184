"""A model that is code of the operator's own, for tests of who allows it: both sides find it as attune.tests.e2e.own_model."""

from __future__ import annotations

from math import prod

from torch import nn

from attune.common.plan import ModelSpec


def tiny(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(spec.shape), spec.classes))
