"""The lab: all work on tensors, as jobs whose arguments and results are values that can be sent to another process.

A job names tensors by blobs of the federation's storage; no open file goes in or out. One job runs at a time, in the order
asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from attune.common.exchange.transform import REACHES, above
from attune.common.methods.method import PartKind
from attune.common.wire.blobs import Blob
from attune.fedserver.core.records import Slot

NO_VARIANTS: Mapping[str, str] = {}
Served = dict[str, dict[str, Blob]]  # client -> part -> what it is served


class Started(msgspec.Struct, frozen=True):
    """The lab's state of a federation that it has taken up.

    Attributes:
        max_bytes: Part that devices hand in -> size in bytes of the largest blob that can be an answer.
        slots: Slots of a new federation's state before round 1, not committed yet.
        remade: Names of state blobs that were damaged and were made again, with the same bits.
        body_digest: Digest of the model's frozen body, which is no part of the state; empty: it has none.
    """

    max_bytes: dict[str, int]
    slots: list[Slot]
    remade: list[str]
    body_digest: str = ""


class Arrived(msgspec.Struct, frozen=True):
    """A part of an update that may be accepted.

    Attributes:
        blob: The values: the blob that came, or one made beside it that is not durable yet.
        facts: Findings of the checks while it was read, such as the norm of its change.
    """

    blob: Blob
    facts: Mapping[str, float]


class RoundOutcome(msgspec.Struct, frozen=True):
    """A round's next state, written beside the present one. It becomes the state once its slots are committed.

    Attributes:
        metrics: Numbers of the aggregators, by name.
        slots: The slots that change.
        bounded: Devices whose change was above the bound, each with its norm in medians of the cohort's norms.
        without_vote: Those of them that did not count at all in some part.
        refused: Why the updates make no valid state; then there is no slot, and the present state stays.
    """

    metrics: dict[str, float]
    slots: list[Slot]
    bounded: dict[str, float] = {}
    without_vote: list[str] = []
    refused: str = ""

    @property
    def weight(self) -> float:
        """The weight of all updates together, where devices keep their embeddings; 0 elsewhere."""
        return self.metrics.get("generated.weight", 0.0)

    @property
    def above(self) -> dict[str, tuple[int, ...]]:
        """Numbers of devices in a masked sum with a change above each of REACHES clipping bounds, by part."""
        parts = [part for part in get_args(PartKind) if above(part, REACHES[0]) in self.metrics]
        return {part: tuple(int(self.metrics[above(part, reach)]) for reach in REACHES) for part in parts}
