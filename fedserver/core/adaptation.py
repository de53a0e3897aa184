"""What a newcomer to a finished federation trains, and what of it the server takes up (docs/operations.md, "Newcomers")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attune.common.errors import SettingError
from attune.common.methods.method import Method, PartKind, options_of
from attune.common.methods.settings.objectives import SETTINGS as OBJECTIVES

Adapt = Literal["personal", "embedding", "hypernetwork", "all"]
MOVES_ALL = frozenset({"hypernetwork", "all"})  # settings under which what all devices have in common moves as well


@dataclass(frozen=True)
class Adaptation:
    """One way of fitting a method to new devices."""

    trains: tuple[str, ...]  # kinds of tensors that a device trains, "personal" for what its objective keeps; empty: all
    returns: tuple[PartKind, ...]  # parts that it hands in
    common: bool  # whether what all devices have in common moves on the server as well


def adaptation_of(method: Method, options: Mapping[str, Any], adapt: Adapt) -> Adaptation | None:
    """None if the method has nothing of a device's own, so that there is nothing to fit.

    Errors: SettingError where an embedding is to be fitted and there is none, or it is fixed.
    """
    sent: tuple[PartKind, ...] = tuple(sorted(kind for kind in method.kinds if kind != "private"))
    generated = options_of(method, options).aggregators.get("generated")
    embeddings = generated.embeddings if generated is not None else "none"
    common = adapt in MOVES_ALL
    if adapt == "all":
        return Adaptation((), sent, common)
    if adapt != "personal":
        if embeddings == "none":
            raise SettingError(f'round.adapt = "{adapt}": method {method.name} generates nothing; take "personal"')
        if embeddings == "fixed" and not common:
            raise SettingError('round.adapt = "embedding": embeddings are fixed (method.embedding); take "hypernetwork"')
        return Adaptation(("generated",), ("generated",), common)
    objective = OBJECTIVES[method.objective]
    moved = {kind for selector, kind in method.parts if selector != "@head" or objective.uses_head}
    own = [kind for kind in method.kinds if kind in moved - {"shared"} and not (kind == "generated" and embeddings == "fixed")]
    trains = (*own, "personal") if objective.keeps_own else tuple(own)
    return Adaptation(trains, tuple(kind for kind in sent if kind in own), common) if trains else None
