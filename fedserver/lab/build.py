"""From a method and its options to the aggregators that carry it out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
from torch import nn

from attune.common.methods.method import ConfiguredMethod, PartKind, assign
from attune.common.models.structure import components
from attune.fedserver.lab.aggregators.base import Aggregator, Blockwise, Vault
from attune.fedserver.lab.aggregators.carrier import Carrier

CLASSES = {
    "mean": "mean:Mean",
    "attention": "attention:Attention",
    "heur-amp": "similarity:HeurAmp",
    "amp": "similarity:Amp",
    "hypernetwork": "hypernetwork:Hypernetwork",
}


def aggregator_class(name: str) -> Callable[..., Blockwise]:
    """The class of the aggregator that settings call `name`, imported when it is asked for."""
    module, _, attribute = CLASSES[name].partition(":")
    found = getattr(importlib.import_module(f"attune.fedserver.lab.aggregators.{module}"), attribute)
    return cast(Callable[..., Blockwise], found)


@dataclass(frozen=True)
class Job:
    """What an aggregator of a part is made of, beside its vault; can be sent to another process."""

    part: PartKind
    aggregator: str
    settings: msgspec.Struct
    seed: int
    components: Mapping[str, list[str]]


Maker = Callable[[Job, Vault], Blockwise]


def made(job: Job, vault: Vault, *carrier: Carrier) -> Blockwise:
    """carrier: who carries out its rounds, if not this process."""
    return aggregator_class(job.aggregator)(job.settings, vault, job.seed, job.components, *carrier)


def aggregators_for(
    configured: ConfiguredMethod,
    model: nn.Module,
    vault_for: Callable[[PartKind], Vault],
    seed: int,
    make: Maker = made,
) -> dict[PartKind, Aggregator]:
    """Return one aggregator for every part that leaves the device and has a tensor in this model.

    Raises:
        SettingError: As `assign`, for a model that does not fit the method.
    """
    method, settings = configured.method, configured.aggregators
    kinds = assign(method, model)
    parts: dict[PartKind, dict[str, list[str]]] = {}
    for component, names in components(model).items():
        for name in names:
            parts.setdefault(kinds[name], {}).setdefault(component, []).append(name)
    result: dict[PartKind, Aggregator] = {}
    for kind, part in parts.items():
        if kind != "private":
            result[kind] = make(Job(kind, method.aggregators[kind], settings[kind], seed, part), vault_for(kind))
    return result
