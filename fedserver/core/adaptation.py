"""Rules for newcomers to a finished federation: what they train, and what the server uses (docs/operations/rounds.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attune.common.methods.method import ConfiguredMethod, PartKind

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
