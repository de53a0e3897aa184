"""The schemes by name: settings, what each one cuts, and how many clients it makes. No numpy until one is used."""

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
    """One row: `cut(source, clients, settings, seed)` is imported when it is used."""

    cut: str  # module:function below simulation.partition.schemes
    settings: type[msgspec.Struct]
    takes: Literal["samples", "text", "nothing"] = "samples"
    test_part: bool = True  # whether the data must come with a test part: else it is held out first
    clients: int | Literal["given", "natural"] = (
        "given"  # the default number; "natural": as many as the data have; "given": no default
    )
    normalise: str = "none"  # unless --normalise is given

    def function(self) -> Callable[..., Cut]:
        """What cuts."""
        module, _, name = self.cut.partition(":")
        found: Callable[..., Cut] = getattr(importlib.import_module(f"attune.simulation.partition.schemes.{module}"), name)
        return found


_SCHEMES = {
    "coarse5": Scheme("coarse:siblings", scheme_settings.Coarse5Settings, clients="natural"),
    "dirichlet": Scheme("shares:dirichlet", scheme_settings.DirichletSettings),
    "iid": Scheme("shares:iid", scheme_settings.IidSettings),
    "natural": Scheme("natural:natural", scheme_settings.NaturalSettings, test_part=False, clients="natural"),
    "pachinko": Scheme("coarse:pachinko", scheme_settings.PachinkoSettings),
    "pathological": Scheme("shares:pathological", scheme_settings.PathologicalSettings),
    "roles": Scheme("roles:roles", scheme_settings.RolesSettings, takes="text", test_part=False, clients="natural"),
    "synthetic": Scheme("synthetic:synthetic", scheme_settings.SyntheticSettings, takes="nothing", clients=100),
    "two-class-unequal": Scheme(
        "unequal:unequal", scheme_settings.UnequalSettings, test_part=False, clients=20, normalise="pixel"
    ),
}


def names() -> list[str]:
    """All schemes, sorted."""
    return sorted(_SCHEMES)


def get(name: str) -> Scheme:
    """The scheme of that name. Errors: SettingError with the nearest name."""
    if name not in _SCHEMES:
        raise SettingError(f"unknown scheme {name!r}{nearest(name, _SCHEMES)}")
    return _SCHEMES[name]


def fields(scheme: Scheme) -> dict[str, Any]:
    """The scheme's settings and their defaults."""
    return {field.encode_name: field.default for field in msgspec.structs.fields(scheme.settings)}
