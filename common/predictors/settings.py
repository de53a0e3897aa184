"""The predictors by name, and the settings of each: importable without torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.config import Count

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model itself has nothing to set."""


class KnnSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nearest of the device's own training samples: docs/methods/fedtp+knn.md."""

    neighbours: Count = 10
    knn_weight: Fraction = 0.6  # of the neighbours; the rest is the model's
    capacity: Part = 1.0  # share of the training samples that is remembered


SETTINGS: dict[str, type[msgspec.Struct]] = {"knn": KnnSettings, "model": ModelSettings}
CLASSES = {"knn": "common.predictors.knn:Knn", "model": "common.predictors.model:Model"}
