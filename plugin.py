"""The names that packages of others import. They keep their meaning between minor versions; examples/plugin uses them.

Each is imported when it is first used, so that rows, settings and readers need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attune.common.config import Positive, Share
    from attune.common.errors import SettingError, ShardError
    from attune.common.exchange.transform import (
        ArrivalContext,
        Cohort,
        DeviceContext,
        PartUpdate,
        RoundContext,
        Transform,
        TransformSettings,
        Unchanged,
    )
    from attune.common.methods.method import Method
    from attune.common.methods.settings.aggregators import AggregatorSettings
    from attune.common.methods.settings.objectives import ObjectiveSettings, PredictorSettings
    from attune.common.models.registry import ModelEntry
    from attune.fedclient.read_options import ReadOptions
    from attune.fedclient.work.executor import Jobs
    from attune.fedclient.work.measures import mean_cross_entropy
    from attune.fedclient.work.objectives.base import Batch, LocalTask, Network, Objective, Tensors, Trained, split
    from attune.fedclient.work.objectives.descent import Descent
    from attune.fedclient.work.predictors.base import Predictor
    from attune.fedserver.lab.aggregators.base import Aggregator, write
    from attune.fedserver.lab.aggregators.mean import VALUE, SharedValue
    from attune.simulation.partition.datasets import Reader
    from attune.simulation.partition.readers.assemble import Raw

_NAMES = {
    "common.config": ("Positive", "Share"),
    "common.errors": ("SettingError", "ShardError"),
    "common.exchange.transform": (
        "ArrivalContext", "Cohort", "DeviceContext", "PartUpdate", "RoundContext", "Transform", "TransformSettings",
        "Unchanged",
    ),
    "common.methods.method": ("Method",),
    "common.methods.settings.aggregators": ("AggregatorSettings",),
    "common.methods.settings.objectives": ("ObjectiveSettings", "PredictorSettings"),
    "common.models.registry": ("ModelEntry",),
    "fedclient.read_options": ("ReadOptions",),
    "fedclient.work.executor": ("Jobs",),
    "fedclient.work.measures": ("mean_cross_entropy",),
    "fedclient.work.objectives.base": ("Batch", "LocalTask", "Network", "Objective", "Tensors", "Trained", "split"),
    "fedclient.work.objectives.descent": ("Descent",),
    "fedclient.work.predictors.base": ("Predictor",),
    "fedserver.lab.aggregators.base": ("Aggregator", "write"),
    "fedserver.lab.aggregators.mean": ("VALUE", "SharedValue"),
    "simulation.partition.datasets": ("Reader",),
    "simulation.partition.readers.assemble": ("Raw",),
}  # fmt: skip
PLACES = {name: f"attune.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [
    "VALUE",
    "Aggregator",
    "AggregatorSettings",
    "ArrivalContext",
    "Batch",
    "Cohort",
    "Descent",
    "DeviceContext",
    "Jobs",
    "LocalTask",
    "Method",
    "ModelEntry",
    "Network",
    "Objective",
    "ObjectiveSettings",
    "PartUpdate",
    "Positive",
    "Predictor",
    "PredictorSettings",
    "Raw",
    "ReadOptions",
    "Reader",
    "RoundContext",
    "SettingError",
    "ShardError",
    "Share",
    "SharedValue",
    "Tensors",
    "Trained",
    "Transform",
    "TransformSettings",
    "Unchanged",
    "mean_cross_entropy",
    "split",
    "write",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'attune.plugin' has no attribute {name!r}: it lists what packages may import")
    return getattr(import_module(PLACES[name]), name)
