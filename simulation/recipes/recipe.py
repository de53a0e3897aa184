"""Definition of a recipe: data cut at several points of an axis, and methods that are compared there. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attune.simulation.partition.samples import Source
from attune.simulation.partition.split import Partition

Cut = Callable[[Source, int], Partition]  # a source and a seed


@dataclass(frozen=True)
class RecipeMethod:
    """Method of a recipe, with its settings and its name in tables."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: Literal["local"] | None = None  # devices also train a model alone


@dataclass(frozen=True)
class RecipePoint:
    """Place on the axis of a recipe. `series` divides a recipe into several curves."""

    x: float
    cut: Cut
    series: str = ""


@dataclass(frozen=True)
class Recipe:
    """Comparison of methods on one data set at several points.

    Attributes:
        data: The file that --data must name; empty means the bundled digits.
        read: Options of the reader, as in `fedclient partition`.
    """

    name: str
    title: str
    axis: str
    points: tuple[RecipePoint, ...]
    entries: tuple[RecipeMethod, ...]
    rounds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    data: str = ""
    read: Mapping[str, Any] = field(default_factory=dict)
    log: bool = True  # the axis is logarithmic


LOCAL, FEDAVG, TUNED = "Local", "FedAvg", "FedAvg, tuned"
RIVALS = (LOCAL, FEDAVG)  # a device that is worse off than with either of them is harmed

# Each score costs a fine-tuning, so devices score at the end alone.
TUNING = {"method.tune_epochs": 20, "method.alpha": 0.1, "train.evaluate": False}
BASELINES = (
    RecipeMethod(LOCAL, "local"),
    RecipeMethod(FEDAVG, "fedavg"),
    RecipeMethod(TUNED, "fedavg+ft", TUNING),
)
