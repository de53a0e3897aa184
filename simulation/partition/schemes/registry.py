"""Registry of the schemes: settings, accepted data and number of clients. numpy is imported when a scheme is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from attune.common.errors import SettingError, nearest
from attune.simulation.partition.schemes import scheme_settings

if TYPE_CHECKING:
    from attune.simulation.partition.schemes.cut import Cut


@dataclass(frozen=True)
class Scheme:
    """Row of the registry. `cut(source, clients, settings, seed)` is imported when it is used."""

    cut: str  # module:function below simulation.partition.schemes
    settings: type[msgspec.Struct]
    takes: Literal["samples", "text", "nothing"] = "samples"
    test_part: bool = True  # whether the scheme needs a test part; data without one get one first
    clients: int | Literal["given", "natural"] = "given"  # default number; "natural": as many as in the data; "given": none
    normalise: str = "none"  # default of --normalise

    def function(self) -> Callable[..., Cut]:
        """Import and return the function that divides a data set."""
        module, _, name = self.cut.partition(":")
        function: Callable[..., Cut] = getattr(importlib.import_module(f"attune.simulation.partition.schemes.{module}"), name)
        return function


SCHEMES = {
    "coarse5": Scheme("shares:siblings", scheme_settings.Coarse5Settings, clients="natural"),
    "counts": Scheme("counts:counts", scheme_settings.CountsSettings, test_part=False, clients="natural"),
    "dirichlet": Scheme("shares:dirichlet", scheme_settings.DirichletSettings),
    "iid": Scheme("shares:iid", scheme_settings.IidSettings),
    "natural": Scheme("natural:natural", scheme_settings.NaturalSettings, test_part=False, clients="natural"),
    "pachinko": Scheme("shares:pachinko", scheme_settings.PachinkoSettings),
    "pathological": Scheme("shares:pathological", scheme_settings.PathologicalSettings),
    "roles": Scheme("natural:roles", scheme_settings.RolesSettings, takes="text", test_part=False, clients="natural"),
    "synthetic": Scheme("synthetic:synthetic", scheme_settings.SyntheticSettings, takes="nothing", clients=100),
    "two-class-unequal": Scheme(
        "counts:unequal", scheme_settings.UnequalSettings, test_part=False, clients=20, normalise="pixel"
    ),
}


def get(name: str) -> Scheme:
    """Return the scheme of that name.

    Raises:
        SettingError: There is none; the message has the nearest name.
    """
    if name not in SCHEMES:
        raise SettingError(f"unknown scheme {name!r}{nearest(name, SCHEMES)}")
    return SCHEMES[name]


def fields(scheme: Scheme) -> dict[str, Any]:
    """Return the scheme's settings with their defaults."""
    return {field.encode_name: field.default for field in msgspec.structs.fields(scheme.settings)}
