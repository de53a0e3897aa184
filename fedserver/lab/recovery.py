"""A damaged file of the state is made again: from the seed, or from the state before and the updates of the last round.

A blob that is made again must have the same bits. The error names a blob for which this is not possible, so that it can be
restored from a backup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attune.common.errors import AttuneError
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.engine import Engine
from attune.fedserver.lab.vault import StateRecipe, kept_slots, recipes_of
from attune.fedserver.ports.blobs import REDO, SERVED, STATE, Blobs, Damaged, blob_of
from attune.fedserver.ports.lab import NO_VARIANTS


def take_up(
    plan: Plan,
    slots: Sequence[Slot],
    blobs: Blobs,
    closed: int,
    variants: Mapping[str, str] = NO_VARIANTS,
) -> tuple[Engine, list[str]]:
    """Return the engine of a starting server, and the names of damaged blobs that were made again.

    Files that a killed process left are removed. Errors are those of Engine, and Damaged.
    """
    recipes = recipes_of(blobs, closed) if slots else []
    kept = {*(blob_of(slot).name for slot in kept_slots(slots, recipes)), *(recipe.name for recipe in recipes)}
    blobs.remove([name for area in (STATE, SERVED, REDO) for name in blobs.names(area) if name not in kept])
    remade = _restore(plan, slots, blobs, recipes[0] if recipes else None, variants)
    engine = Engine(plan, slots, blobs, closed, variants=variants)
    engine.remember(recipes)
    return engine, remade


def _restore(
    plan: Plan, slots: Sequence[Slot], blobs: Blobs, recipe: StateRecipe | None, variants: Mapping[str, str]
) -> list[str]:
    """Make damaged slots of the first state and of the last round again, and return the names of those blobs.

    The bytes of other slots are checked when they are first read.

    Raises:
        Damaged: A blob cannot be made again.
    """
    first = [slot for slot in slots if slot.file.rsplit(".", 2)[1] == "0"]  # written before round 1
    last = [slot for slot in recipe.made if slot in slots] if recipe is not None else []
    remade = _remake(first, blobs, lambda: Engine(plan, [], blobs, 0, REDO).staged_slots())
    if recipe is not None:
        before, closed, made = recipe.before(slots), recipe.round - 1, recipe
        remade += _remake(last, blobs, lambda: Engine(plan, before, blobs, closed, REDO, variants=variants).follow(made))
    return remade


def _remake(slots: Sequence[Slot], blobs: Blobs, again: Callable[[], list[Slot]]) -> list[str]:
    """Make slots again. `again` writes them, and maybe others, below REDO."""
    damaged = {slot: reason for slot in slots if (reason := _damage(slot, blobs))}
    if not damaged:
        return []
    try:
        made = {(slot.part, slot.key): slot for slot in again()}
        for slot in damaged:
            twin = made.get((slot.part, slot.key))
            if twin is None or (twin.digest, twin.size) != (slot.digest, slot.size):
                raise Damaged("what is left of the round gives other bits")
            blobs.keep(Blob(f"{REDO}{twin.file}", twin.digest, twin.size), f"{STATE}{slot.file}")
    except (AttuneError, KeyError) as error:
        reasons = "; ".join(damaged.values())
        raise Damaged(f"{reasons} (it cannot be made again: {error})") from error
    finally:
        blobs.remove(blobs.names(REDO))
    return [blob_of(slot).name for slot in damaged]


def _damage(slot: Slot, blobs: Blobs) -> str:
    """Return what is wrong with a slot's blob; empty if it is whole."""
    try:
        blobs.open(blob_of(slot)).close()
    except Damaged as damaged:
        return str(damaged)
    return ""
