"""Real models of the registry, small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from common.models.registry import build, default_spec


def vit() -> nn.Module:
    return build(default_spec("images", (8, 8, 1), 10, 0, "vit", {}), seed=0)


def dnn() -> nn.Module:
    return build(default_spec("tabular", (6,), 3, 0, "dnn", {}), seed=0)


def transformer() -> nn.Module:
    return build(default_spec("tokens", (5,), 4, 9, "transformer", {}), seed=0)


@pytest.fixture
def models() -> dict[str, Callable[[], nn.Module]]:
    return {"vit": vit, "dnn": dnn, "transformer": transformer}
