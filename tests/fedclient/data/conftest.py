"""Shards and plans for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attune.common.config import TrainSettings
from attune.common.plan import ModelSpec, Plan

GOOD = {"images": (np.uint8, (5, 4)), "tokens": (np.int32, (6,)), "series": (np.float32, (7, 3)), "tabular": (np.float64, (5,))}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a shard's folder from x, y, test (a pair or None) and meta (a mapping or text)."""

    def make(x: Any, y: Any, test: tuple[Any, Any] | None = None, meta: Any = None, name: str = "mine") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        np.savez(folder / "train.npz", x=x, y=y)
        if test is not None:
            np.savez(folder / "test.npz", x=test[0], y=test[1])
        if meta is not None:
            (folder / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
        return folder

    return make


@pytest.fixture
def samples() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Return a function that makes n random samples x of a kind, with labels 0, 1, 0, 1, ..."""

    def make(kind: str, n: int = 80) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(3)
        type_, shape = GOOD[kind]
        x = rng.integers(0, 200, (n, *shape)) if np.dtype(type_).kind in "iu" else rng.normal(3, 2, (n, *shape))
        return x.astype(type_), np.arange(n) % 2

    return make


@pytest.fixture
def plan_for() -> Callable[..., Plan]:
    def make(kind: Any, shape: tuple[int, ...], classes: list[Any], vocabulary: int = 0) -> Plan:
        spec = ModelSpec("any", kind, shape, len(classes), vocabulary)
        return Plan("f", 0, spec, classes, "fedavg", {}, TrainSettings())

    return make
