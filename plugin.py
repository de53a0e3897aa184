"""The names that packages of others import. They keep their meaning between minor versions; examples/plugin uses them.

Each is imported when it is first used, so that rows, settings and readers need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attune.common.config import Positive as Positive
    from attune.common.config import Share as Share
    from attune.common.errors import SettingError as SettingError
    from attune.common.errors import ShardError as ShardError
    from attune.common.exchange.transform import ArrivalContext as ArrivalContext
    from attune.common.exchange.transform import Cohort as Cohort
    from attune.common.exchange.transform import DeviceContext as DeviceContext
    from attune.common.exchange.transform import PartUpdate as PartUpdate
    from attune.common.exchange.transform import RoundContext as RoundContext
    from attune.common.exchange.transform import Transform as Transform
    from attune.common.exchange.transform import TransformSettings as TransformSettings
    from attune.common.exchange.transform import Unchanged as Unchanged
    from attune.common.methods.method import Method as Method
    from attune.common.methods.settings.aggregators import AggregatorSettings as AggregatorSettings
    from attune.common.methods.settings.objectives import ObjectiveSettings as ObjectiveSettings
    from attune.common.methods.settings.objectives import PredictorSettings as PredictorSettings
    from attune.common.models.registry import ModelEntry as ModelEntry
    from attune.fedclient.read_options import ReadOptions as ReadOptions
    from attune.fedclient.work.executor import Jobs as Jobs
    from attune.fedclient.work.measures import mean_cross_entropy as mean_cross_entropy
    from attune.fedclient.work.objectives.base import Batch as Batch
    from attune.fedclient.work.objectives.base import LocalTask as LocalTask
    from attune.fedclient.work.objectives.base import Network as Network
    from attune.fedclient.work.objectives.base import Objective as Objective
    from attune.fedclient.work.objectives.base import Tensors as Tensors
    from attune.fedclient.work.objectives.base import Trained as Trained
    from attune.fedclient.work.objectives.base import split as split
    from attune.fedclient.work.objectives.descent import Descent as Descent
    from attune.fedclient.work.predictors.base import Predictor as Predictor
    from attune.fedserver.lab.aggregators.base import Aggregator as Aggregator
    from attune.fedserver.lab.aggregators.base import write as write
    from attune.fedserver.lab.aggregators.mean import VALUE as VALUE
    from attune.fedserver.lab.aggregators.mean import SharedValue as SharedValue
    from attune.simulation.partition.datasets import Reader as Reader
    from attune.simulation.partition.readers.assemble import Raw as Raw

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
__all__ = sorted(PLACES)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'attune.plugin' has no attribute {name!r}: it lists what packages may import")
    return getattr(import_module(PLACES[name]), name)
