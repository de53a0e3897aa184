"""Rules for newcomers to a finished federation (docs/operations/rounds.md), and for embeddings of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attune.common.methods.method import ConfiguredMethod, PartKind
from attune.common.methods.settings.aggregators import HypernetworkSettings

Adapt = Literal["personal", "embedding", "hypernetwork", "all"]
MOVES_ALL = frozenset({"hypernetwork", "all"})  # settings under which the tensors that all devices share change as well


@dataclass(frozen=True)
class AdaptationSpec:
    """Scope of an adaptation for one method."""

    trains: tuple[str, ...]  # kinds of tensors that a device trains; "personal" is what its objective keeps; empty: all
    returns: tuple[PartKind, ...]  # parts that it hands in
    common: bool  # whether the tensors that all devices share change on the server as well


def adaptation_of(configured: ConfiguredMethod, adapt: Adapt) -> AdaptationSpec | None:
    """Return how newcomers are fitted; None if the method has nothing of a device's own, so that there is nothing to fit."""
    method, objective = configured.method, configured.objective
    sent: tuple[PartKind, ...] = tuple(sorted(kind for kind in method.kinds if kind != "private"))
    generated = configured.aggregators.get("generated")
    embeddings = generated.embeddings if generated is not None else "none"
    common = adapt in MOVES_ALL
    if adapt == "all":
        return AdaptationSpec((), sent, common)
    if adapt != "personal":
        return AdaptationSpec(("generated",), ("generated",), common)
    moved = {kind for selector, kind in method.parts if selector != "@head" or objective.uses_head}
    personal = [
        kind for kind in method.kinds if kind in moved - {"shared"} and not (kind == "generated" and embeddings == "fixed")
    ]
    trains = (*personal, "personal") if objective.keeps_own else tuple(personal)
    return AdaptationSpec(trains, tuple(kind for kind in sent if kind in personal), common) if trains else None


def device_defaults(method_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with embeddings on the devices: devices weigh steps by samples, and nothing is taken back."""
    if method_settings.get("embedding") != "device":
        return {}
    return {"method": {"bound_samples": 0.0}, "round": {"take_back": 0.0}}


def embeds_on_devices(configured: ConfiguredMethod) -> bool:
    """Return whether each device keeps its embedding."""
    return any(isinstance(part, HypernetworkSettings) and part.on_device for part in configured.aggregators.values())


def describes_devices(configured: ConfiguredMethod) -> bool:
    """Return whether a later device's embedding starts from what it says of its data."""
    return any(isinstance(part, HypernetworkSettings) and part.is_described for part in configured.aggregators.values())
