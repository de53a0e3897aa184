"""What a recipe is: data cut at several points of an axis, and the methods that meet there. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attune.simulation.partition.samples import Source
from attune.simulation.partition.split import Partition

Cut = Callable[[Source, int], Partition]  # a source and a seed


@dataclass(frozen=True)
class Entry:
    """A method with its settings, as a recipe calls it."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: Literal["local"] | None = None  # devices also train a model alone


@dataclass(frozen=True)
class Point:
    """One place on the axis; `series` parts a recipe in several curves."""

    x: float
    cut: Cut
    series: str = ""


@dataclass(frozen=True)
class Recipe:
    """data: what --data has to be; empty: the bundled digits. read: the reader's options, as of `fedclient partition`."""

    name: str
    title: str
    axis: str
    points: tuple[Point, ...]
    entries: tuple[Entry, ...]
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
    Entry(LOCAL, "local"),
    Entry(FEDAVG, "fedavg"),
    Entry(TUNED, "fedavg+ft", TUNING),
)
