"""The aggregators that carry out a method on the server, made from its typed settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from torch import nn

from attune.common.methods.method import SOLVED, ConfiguredMethod, PartKind, assign
from attune.common.methods.settings.aggregators import SETTINGS, HypernetworkSettings
from attune.common.models.structure import components_by_part
from attune.common.plugins import implementation_of, imported
from attune.fedserver.lab.aggregators.base import IN_TURN, Aggregator, Carrier, Vault

CLASSES = {
    "mean": "mean:Mean",
    "attention": "attention:Mcsa",
    "heur-amp": "attention:HeurAmp",
    "amp": "attention:Amp",
    "hypernetwork": "hypernetwork:Hypernetwork",
    "closed-form": "closed_form:ClosedFormSums",
}


class AggregatorClass(Protocol):
    """The one signature with which every aggregator is made, a plug-in's too; fedserver.lab.aggregators.base says the rest."""

    def __call__(
        self, settings: Any, vault: Vault, seed: int, components: Mapping[str, list[str]], carrier: Carrier
    ) -> Aggregator: ...


def aggregator_class(name: str, settings: Any = None) -> AggregatorClass:
    """Import the class of the aggregator that settings call `name`."""
    if isinstance(settings, HypernetworkSettings) and settings.on_device:
        return cast(AggregatorClass, imported("attune.fedserver.lab.aggregators.shared_network:SharedNetwork"))
    if name in CLASSES:
        return cast(AggregatorClass, imported(f"attune.fedserver.lab.aggregators.{CLASSES[name]}"))
    return cast(AggregatorClass, implementation_of(SETTINGS[name], name))


@dataclass(frozen=True)
class AggregatorSpec:
    """Arguments of a part's aggregator, except its vault; it can be sent to another process."""

    part: PartKind
    aggregator: str
    settings: msgspec.Struct
    seed: int
    components: Mapping[str, list[str]]


Maker = Callable[[AggregatorSpec, Vault], Aggregator]


def made(job: AggregatorSpec, vault: Vault, carrier: Carrier = IN_TURN) -> Aggregator:
    """Make the aggregator of a part; `carrier` carries out the pieces of its rounds."""
    return aggregator_class(job.aggregator, job.settings)(job.settings, vault, job.seed, job.components, carrier)


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
    result: dict[PartKind, Aggregator] = {}
    for kind, part in components_by_part(model, kinds).items():
        if kind != "private":
            result[kind] = make(AggregatorSpec(kind, method.aggregators[kind], settings[kind], seed, part), vault_for(kind))
    if SOLVED in settings:
        result[SOLVED] = make(AggregatorSpec(SOLVED, "closed-form", settings[SOLVED], seed, {}), vault_for(SOLVED))
    return result
