"""Methods by name; each is imported when it is asked for, and none imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from attune.common.errors import SettingError, nearest
from attune.common.methods.method import Method, custom_method
from attune.common.plan import Plan

DEFAULT = "fedtp"

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
    """The method that a [method] table names, or describes when its name is "custom". Errors: SettingError."""
    name = options.get("name", DEFAULT)
    return custom_method(options) if name == "custom" else get(name)


def method_of(plan: Plan) -> Method:
    """The method that a federation's plan has fixed. Errors: SettingError where this installation does not know it."""
    return method_from_options({**plan.method_options, "name": plan.method})
