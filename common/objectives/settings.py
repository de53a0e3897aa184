"""The objectives by name, and the settings of each: importable without torch."""

from __future__ import annotations

import msgspec

from common.config import NonNegative


class SgdSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plain loss has nothing to set."""


class ProximalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FedProx's mu, which is FedMCSA's lambda; 0 is plain SGD."""

    mu: NonNegative = 0.01


SETTINGS: dict[str, type[msgspec.Struct]] = {"sgd": SgdSettings, "proximal": ProximalSettings}
CLASSES = {"sgd": "common.objectives.sgd:Sgd", "proximal": "common.objectives.proximal:Proximal"}
