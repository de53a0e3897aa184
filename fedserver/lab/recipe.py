"""How the present state was made: kept beside it until the next one is committed, so that it can be made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from typing_extensions import Self

from attune.common.text import from_json
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import AcceptedUpdate, Slot
from attune.fedserver.ports.blobs import STATE, Blobs


class StateRecipe(msgspec.Struct, frozen=True):
    """A round's ingredients. The blobs that it names are kept as long as it is."""

    round: int
    adaptation: AdaptationSpec | None  # None: a round of training
    admitted: Sequence[str]  # who took part since the state before
    entries: Mapping[str, AcceptedUpdate]  # the cohort's updates, by client
    replaced: Sequence[Slot]  # of the state before, what this one has in other versions
    made: Sequence[Slot]
    founders: Sequence[str] = ()  # of those who took part

    @property
    def name(self) -> str:
        """Name of its blob."""
        return name_of(self.round)

    def before(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots before the round, from those after it."""
        made = {(slot.part, slot.key) for slot in self.made}
        return [*(slot for slot in slots if (slot.part, slot.key) not in made), *self.replaced]

    def save(self, blobs: Blobs) -> None:
        """Write the recipe durably.

        Raises:
            DiskFull: The disk has no room.
        """
        blobs.put(self.name, msgspec.json.encode(self))

    @classmethod
    def load(cls, blobs: Blobs, round_: int) -> Self | None:
        """Return how the state after this round was made; None if that is unknown or unreadable."""
        try:
            return from_json(blobs.get(name_of(round_)), cls)
        except (KeyError, msgspec.DecodeError):
            return None


def name_of(round_: int) -> str:
    """Return the name of the recipe's blob for a round."""
    return f"{STATE}recipe.{round_}.json"
