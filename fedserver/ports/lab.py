"""The lab: all work on tensors, as jobs whose arguments and results are values that can be sent to another process.

A job names tensors by blobs of the federation's storage; no open file goes in or out. One job runs at a time, in the order
asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, get_args

from attune.common.exchange.transform import REACHES, above
from attune.common.methods.method import PartKind
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Unmasking

NO_VARIANTS: Mapping[str, str] = {}
Served = dict[str, dict[str, Blob]]  # client -> part -> what it is served


@dataclass(frozen=True)
class Started:
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


@dataclass(frozen=True)
class Arrived:
    """A part of an update that may be accepted.

    Attributes:
        blob: The values: the blob that came, or one made beside it that is not durable yet.
        facts: Findings of the checks while it was read, such as the norm of its change.
    """

    blob: Blob
    facts: Mapping[str, float]


@dataclass(frozen=True)
class RoundOutcome:
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
    bounded: dict[str, float] = field(default_factory=dict)
    without_vote: list[str] = field(default_factory=list)
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


class Lab(Protocol):
    """The work on tensors of one federation. Every job may raise AttuneError, among them Damaged, which names the blob."""

    async def start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str] = NO_VARIANTS) -> Started:
        """Take up the state after `closed` rounds, or make the state of a new federation (no slots).

        `variants` has the variant of the model of each client that has one, as for `vary`.

        Blobs of the state that belong to no slot are removed. Damaged ones are made again where that gives the same bits.

        Raises:
            SettingError: The model or method cannot be built.
            Damaged: A blob cannot be made again; it must be restored.
        """

    async def serve(
        self, clients: Sequence[str], founders: Sequence[str] = (), version: int | None = None, solved: bool = True
    ) -> Served:
        """Return what each client is served now, by client and part.

        Args:
            clients: The clients that are served.
            founders: Those of them that enrolled before the first round was closed.
            version: The round after which the state was made that they are served once more; None: the present state.
            solved: Whether they are served the closed form that joins blends, too.
        """

    async def describe(self, client: str, description: Sequence[float]) -> bool:
        """Note what a client says of its data (common.models.description), for embeddings that start from descriptions.

        It is kept in memory until the client's update is in a committed state. Return whether it has the form of the model's
        descriptions; if not, it is ignored.
        """

    async def vary(self, variants: Mapping[str, str]) -> None:
        """Note the variants of the model that clients have, before they are served. One without a variant has the plan's."""

    async def cold_start(self, clients: Sequence[str]) -> Served:
        """Return for each client and part what an unknown device of its variant is served."""

    async def pack(self, blobs: Sequence[Blob]) -> dict[str, Blob]:
        """Return, by the digest of what is served, the same without loss in fewer bytes (PACKED), where they are fewer."""

    async def changes(self, clients: Sequence[str], parts: Sequence[str]) -> dict[str, Smaller]:
        """Return, by the digest of what these clients are served of these parts, its change from what the last commit replaced.

        A change is left out where the older value is gone or is the same, or where it makes no fewer bytes. Older values are
        kept from the first such call on.
        """

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

    async def aggregate(
        self,
        entries: Mapping[str, AcceptedUpdate],
        founders: Sequence[str] = (),
        adaptation: AdaptationSpec | None = None,
        unmasking: Unmasking | None = None,
    ) -> RoundOutcome:
        """Make the next state of a cohort's accepted updates.

        Args:
            entries: The updates, by client.
            founders: Same as for `serve`.
            adaptation: Parts that move, if the cohort are newcomers to a finished federation.
            unmasking: Secrets that take the masks off the sum of the updates, under secure aggregation.
        """

    async def go_back(self, to: int) -> RoundOutcome:
        """Make the state after the round `to` the next one.

        If that state is not known any more, or damaged, the outcome has no slot, and `refused` says so.
        """

    async def another_start(self) -> RoundOutcome:
        """Make a state that is near the present one the next one, from which a secure sum may be made again."""

    async def settle(self, holders: Sequence[str] = ()) -> None:
        """Make the outcome the present state, after its commit. What was generated for `holders` stays for their orders."""

    async def forget(self, oldest: int) -> None:
        """Remove the states before that after the round `oldest`, to which the federation does not go back any more.

        The state before the present one always stays.
        """
