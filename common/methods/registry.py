"""Methods by name; each is imported when it is asked for, and none imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from attune.common.errors import SettingError, nearest
from attune.common.methods.method import ConfiguredMethod, Method, configure, custom_method
from attune.common.plan import Plan

DEFAULT = "fedtp"
_CONFIGURED = "configured"  # where a plan keeps its method with typed settings

_MODULES = {
    "ditto": "ditto:DITTO",
    "fedamp": "fedamp:FEDAMP",
    "fedavg": "fedavg:FEDAVG",
    "fedavg+ft": "fedavg_ft:FEDAVG_FT",
    "fedavg+mcsa": "fedmcsa:FEDAVG_MCSA",
    "fedbn": "fedbn:FEDBN",
    "fedmcsa": "fedmcsa:FEDMCSA",
    "fedmcsa-mcsa": "fedmcsa:FEDMCSA_WITHOUT_MCSA",
    "fedper": "fedper:FEDPER",
    "fedprox": "fedprox:FEDPROX",
    "fedrep": "fedrep:FEDREP",
    "fedrod": "fedrod:FEDROD",
    "fedtp": "fedtp:FEDTP",
    "fedtp+fedper": "fedtp:FEDTP_FEDPER",
    "fedtp+fedrod": "fedrod:FEDTP_FEDROD",
    "fedtp+knn": "fedtp:FEDTP_KNN",
    "fedtp+mcsa": "fedtp:FEDTP_MCSA",
    "fedtp-encoder": "fedtp:FEDTP_ENCODER",
    "fedtp-mlp": "fedtp:FEDTP_MLP",
    "fedtp-norm": "fedtp:FEDTP_NORM",
    "heurfedamp": "fedamp:HEURFEDAMP",
    "local": "local:LOCAL",
    "per-fedavg": "per_fedavg:PER_FEDAVG",
    "pfedgp": "pfedgp:PFEDGP",
    "pfedhn": "pfedhn:PFEDHN",
    "pfedme": "pfedme:PFEDME",
    "pfedme+mcsa": "pfedme:PFEDME_MCSA",
    "vanilla-personalized": "vanilla_personalized:VANILLA_PERSONALIZED",
}


def names() -> list[str]:
    """The built-in methods, sorted."""
    return sorted(_MODULES)


def get(name: str) -> Method:
    """The built-in method of that name. Errors: SettingError with the nearest name."""
    if name not in _MODULES:
        raise SettingError(f"unknown method {name!r}{nearest(name, _MODULES)}")
    module, _, attribute = _MODULES[name].partition(":")
    method = getattr(importlib.import_module(f"attune.common.methods.{module}"), attribute)
    assert isinstance(method, Method)  # noqa: S101 (our own table)
    return method


def method_from_options(options: Mapping[str, Any]) -> Method:
    """Return the method that a [method] table names, or describes when its name is "custom".

    Raises:
        SettingError: For an unknown name, or a description that is not one.
    """
    name = options.get("name", DEFAULT)
    return custom_method(options) if name == "custom" else get(name)


def configured_from(options: Mapping[str, Any]) -> ConfiguredMethod:
    """Return the method of a [method] table with its typed settings. This is the one place where they are parsed.

    Raises:
        SettingError: As `method_from_options` and `configure`.
    """
    return configure(method_from_options(options), options)


def configured_in(plan: Plan) -> ConfiguredMethod:
    """Return the method that a plan has fixed with its typed settings, which are parsed once and kept with the plan.

    Raises:
        SettingError: If this installation does not know the method or one of its settings.
    """
    kept = vars(plan)  # beside the plan's fields: neither compared nor encoded
    if _CONFIGURED not in kept:
        kept[_CONFIGURED] = configured_from({**plan.method_options, "name": plan.method})
    configured: ConfiguredMethod = kept[_CONFIGURED]
    return configured
