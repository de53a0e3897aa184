"""The predictors by name, and the settings of each: importable without torch."""

from __future__ import annotations

import msgspec


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model itself has nothing to set."""


SETTINGS: dict[str, type[msgspec.Struct]] = {"model": ModelSettings}
CLASSES = {"model": "common.predictors.model:Model"}
