"""What works on tensors, as jobs whose arguments and results are values that can be sent to another process.

A job names tensors by blobs of the federation's store; it is given no open file and hands none out. One job runs at a time,
in the order asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller

Served = dict[str, dict[str, Blob]]  # client -> part -> what it is served


@dataclass(frozen=True)
class Started:
    """The lab holds the state of a federation."""

    max_bytes: dict[str, int]  # part that devices hand in -> the largest blob that can be an answer
    slots: list[Slot]  # of a new federation the state before round 1, not committed yet
    remade: list[str]  # names of state blobs that were damaged and were made again, with the same bits
    body_digest: str = ""  # of the model's frozen body, which is no part of the state; empty: it has none


@dataclass(frozen=True)
class Arrived:
    """A part of an update that may be accepted.

    Attributes:
        blob: The values: the blob that came, or one made beside it that is not durable yet.
        facts: What was found out while it was read, such as the norm of its change.
    """

    blob: Blob
    facts: Mapping[str, float]


@dataclass(frozen=True)
class RoundOutcome:
    """A round's next state, written beside the present one: true once its slots are committed.

    bounded: whose change was above the bound, and how many times the cohort's median norm it was. without_vote: whose did not
    count at all for it, in some part. refused: why the updates make no state that may be; then there is no slot, and the
    present state stays.
    """

    metrics: dict[str, float]
    slots: list[Slot]
    bounded: dict[str, float] = field(default_factory=dict)
    without_vote: list[str] = field(default_factory=list)
    refused: str = ""


class Lab(Protocol):
    """Errors of all jobs: AttuneError, among them Damaged, which names the file."""

    async def start(self, plan: Plan, slots: Sequence[Slot], closed: int) -> Started:
        """Takes up the state after `closed` rounds, or makes that of a new federation (no slots).

        Blobs of the state that belong to no slot go. Damaged ones are made again where that gives the same bits.
        Errors: SettingError for a model or method that cannot be built, Damaged with what to restore.
        """
        ...

    async def serve(self, clients: Sequence[str], founders: Sequence[str] = ()) -> Served:
        """For each client and part what it is served now. founders: who of them enrolled before the first round was closed."""
        ...

    async def cold_start(self) -> dict[str, Blob]:
        """For each part what a device is served of which nothing is known."""
        ...

    async def pack(self, blobs: Sequence[Blob]) -> dict[str, Blob]:
        """By the digest of what is served, the same without loss in fewer bytes (PACKED), where they are fewer."""
        ...

    async def changes(self, clients: Sequence[str], parts: Sequence[str]) -> dict[str, Smaller]:
        """By the digest of what these clients are served of these parts, its change from what they were served before the last
        commit: where that is still there, was another value, and makes fewer bytes. From the first such call on it is kept.
        """
        ...

    async def arrive(self, client: str, part: str, blob: Blob, encoding: str, served: bool, max_norm: float) -> Arrived:
        """Decode and check an update's part that has just come in.

        Args:
            client: The device.
            part: The part of the update.
            blob: Its bytes as they came.
            encoding: The encoding that the device's order asked for.
            served: Whether that order served a value from which the blob may be the change.
            max_norm: The largest L2 norm of the change; 0: no limit.

        Raises:
            WireError: It cannot be read, or does not fit; names device and tensor.
            UpdateRefused: It could harm the state; names the device.
        """
        ...

    async def aggregate(self, entries: Mapping[str, AcceptedUpdate], founders: Sequence[str] = ()) -> RoundOutcome:
        """A cohort's accepted updates, by client, into the next state; founders as above."""
        ...

    async def adapt(
        self, entries: Mapping[str, AcceptedUpdate], adaptation: AdaptationSpec, founders: Sequence[str] = ()
    ) -> RoundOutcome:
        """As `aggregate`, of newcomers to a finished federation."""
        ...

    async def go_back(self) -> RoundOutcome:
        """The state before the last round as the next one; without a slot if that is not known any more."""
        ...

    async def settle(self) -> None:
        """After the commit: the outcome is the state, and what is two states old goes."""
        ...
