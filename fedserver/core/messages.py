"""Events and effects of the round, its durable record, and the ids of orders.

`now` is in seconds of a monotonic clock, the same one in all events of a process. Times that people see are unix times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import cast

import msgspec
from msgspec.structs import replace
from typing_extensions import Self

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import FixedSurvivors, WorkName
from attune.common.exchange.transform import REACHES


class StrEnum(str, Enum):
    """Enum whose members are their text, like enum.StrEnum of Python 3.11: `str`, `format` and `%` give the value."""

    __str__ = str.__str__


class Phase(StrEnum):
    """Phases of a round, as the ledger records them."""

    WAITING = "waiting"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    EVALUATING = "evaluating"
    DONE = "done"
    FAILED = "failed"


class Resumed(msgspec.Struct, frozen=True):
    """The first event of a process, and the event after a failure that tries the step again."""

    now: float


class Connected(msgspec.Struct, frozen=True):
    """A device said Hello on a new stream."""

    name: str
    now: float
    newcomer: bool = False  # no update of it was ever aggregated
    empty: bool = False  # it has lost what it had of the run
    outside: bool = False  # it has not the tag that `round.devices` asks for


class Disconnected(msgspec.Struct, frozen=True):
    """A device's stream has ended."""

    name: str
    now: float


class Reported(msgspec.Struct, frozen=True):
    """A device's update or evaluation is durable in the inbox."""

    name: str
    round: int
    now: float
    work: WorkName = "train"
    loss: float | None = None  # its training loss


class DeviceProgressed(msgspec.Struct, frozen=True):
    """A device reports progress with its order."""

    name: str
    now: float


class Excused(msgspec.Struct, frozen=True):
    """A device's answer is no longer expected: it cannot carry out the order, or its update was refused."""

    name: str
    now: float
    troubled: bool = False  # the device itself says that it cannot carry out the order


class Expelled(msgspec.Struct, frozen=True):
    """The operator has revoked a device."""

    name: str
    now: float


class Paused(msgspec.Struct, frozen=True):
    """The operator pauses the federation (no further round opens), or resumes it (`on` is False)."""

    on: bool
    now: float


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""

    now: float


class Aggregated(msgspec.Struct, frozen=True):
    """The new state is durable. setback: why it is not made from the cohort's updates; empty if it is."""

    now: float
    setback: str = ""
    weight: float = 0.0  # of all updates together that made it, where devices keep their embeddings
    summed: SummedChanges | None = None  # under secure aggregation
    likeliest: int = 0  # as in the record
    last: int = 0


class Attempted(msgspec.Struct, frozen=True):
    """An attempt of secure aggregation begins, or its survivors are fixed. cohort: that of all later sums, if there is one."""

    now: float
    attempt: int
    fixed: FixedSurvivors | None = None
    cohort: tuple[str, ...] = ()


class Exchanged(msgspec.Struct, frozen=True):
    """An exchange of secure aggregation, or a question of a survey, is over.

    Attributes:
        now: When it was.
        kind: Its name among the fleet's paces; empty: it has none.
        took: Seconds that each device needed for its answer.
        costs: For how many seconds the others waited for devices that were silent, or much slower than the fleet.
    """

    now: float
    kind: str
    took: Mapping[str, float]
    costs: Mapping[str, float]


class StepFailed(msgspec.Struct, frozen=True):
    """The step under way cannot be carried out."""

    reason: str


Event = (
    Resumed
    | Connected
    | Disconnected
    | Reported
    | DeviceProgressed
    | Excused
    | Expelled
    | Paused
    | Tick
    | Aggregated
    | Attempted
    | Exchanged
    | StepFailed
)


class Open(msgspec.Struct, frozen=True):
    """Send orders: for training, or (work "evaluate") to evaluate the state after the closed `round`."""

    work: WorkName
    round: int
    devices: tuple[str, ...]


class Aggregate(msgspec.Struct, frozen=True):
    """Close this round: make the next state from the cohort's updates."""

    round: int
    cohort: tuple[str, ...]


class GoBack(msgspec.Struct, frozen=True):
    """Close this round without its updates: the state after the round `to` becomes the state again."""

    round: int
    to: int
    why: str


class FinishDevices(msgspec.Struct, frozen=True):
    """Tell these devices that the federation is over: they keep their models and leave."""

    devices: tuple[str, ...]


class Acknowledge(msgspec.Struct, frozen=True):
    """Receipt for a device's update: accepted, or too late."""

    name: str
    accepted: bool


class PassOver(msgspec.Struct, frozen=True):
    """Report that these devices missed too many orders of this kind. They get no more of them for now."""

    devices: tuple[str, ...]
    work: WorkName = "train"


class AskAgain(msgspec.Struct, frozen=True):
    """Report that these devices get orders of this kind again, after they had been passed over."""

    devices: tuple[str, ...]
    work: WorkName = "train"


class DiscardStale(msgspec.Struct, frozen=True):
    """Tell a device, and the operator, that its update does not count because it is too stale."""

    name: str
    staleness: int


Effect = Open | Aggregate | GoBack | FinishDevices | Acknowledge | PassOver | AskAgain | DiscardStale


def together(effects: Iterable[Effect]) -> list[Effect]:
    """Merge neighbouring `Open` effects for the same order into one, so that their orders are opened together."""
    joined: list[Effect] = []
    for effect in effects:
        last = joined[-1] if joined else None
        if isinstance(effect, Open) and isinstance(last, Open) and (last.work, last.round) == (effect.work, effect.round):
            joined[-1] = replace(last, devices=(*last.devices, *effect.devices))
        else:
            joined.append(effect)
    return joined


class SummedChanges(msgspec.Struct, frozen=True):
    """Sizes of the changes that a masked sum is of.

    Attributes:
        round: The round.
        devices: How many devices are in the sum.
        above: By part, how many of them have a number that changes by more than each of REACHES clipping bounds.
    """

    round: int
    devices: int
    above: Mapping[str, tuple[int, ...]]

    @property
    def clipped(self) -> int:
        """How many devices clipped at least one number, in the part where they are most."""
        return max(counts[REACHES.index(1.0)] for counts in self.above.values())

    def told(self, clip: float) -> str:
        """Return the same in words; clip: the bound, `privacy.secure_clip`."""
        counts = tuple(map(max, zip(*self.above.values(), strict=True)))
        beyond = [reach for reach, count in zip(REACHES, counts, strict=True) if count]
        enough = next((reach for reach in REACHES if reach not in beyond), None)
        largest = (
            f"no number changed by more than {enough * clip:g}"
            if enough
            else f"some changed by more than {beyond[-1] * clip:g}"
        )
        return (
            f"{self.clipped} of {self.devices} devices clipped their update in round {self.round}; "
            f"privacy.secure_clip = {clip:g}, and {largest}"
        )


class EarlierState(msgspec.Struct, frozen=True):
    """A state before the present one that is kept: after which round, and the median of the losses reported for it."""

    round: int
    loss: float | None = None


class Record(msgspec.Struct, frozen=True):
    """Durable part of the round's state, as the ledger keeps it.

    `round` counts closed rounds. `devices` hold orders; those of the `cohort` among them exchange weights. The deadline is not
    kept: the monotonic clock of a restarted process starts anew, and so does the deadline.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    devices: tuple[str, ...] = ()
    cohort: tuple[str, ...] = ()
    excused: tuple[str, ...] = ()  # devices that hold an order but are not waited for
    replaced: tuple[str, ...] = ()  # members of the cohort whose places others took; their updates still count
    last_cohort: tuple[str, ...] = ()  # devices whose updates made the present state
    adapting: Mapping[str, int] = {}  # newcomers to the finished federation, and how many rounds each has had
    loss: float | None = None  # median training loss of the last round that counted
    earlier: tuple[EarlierState, ...] = ()  # states to which the federation can go back, oldest first
    spoiled: str = ""  # why the open step goes back to an earlier state; empty: it does not
    back_to: int = -1  # the round after which that state was made, of the open or the latest such step; -1: none
    setback: str = ""  # the last round of which no update counted, and why
    given_up: int = 0  # the last round whose state was taken back; 0: none
    taken_back: tuple[int, ...] = ()  # rounds that took a state back, of the last WINDOW rounds
    taken_back_at: tuple[float, ...] = ()  # unix times of the latest TAKE_BACKS of them
    opened_at: float = 0.0  # unix time
    reason: str = ""  # why the step failed
    failed_in: Phase = Phase.WAITING
    paused: bool = False  # no further training round opens until the operator resumes
    attempt: int = 0  # the latest attempt of secure aggregation in the open step; 0: none
    fixed: FixedSurvivors | None = None  # of this attempt, once they are: the step ends with their sum, or without any
    same_cohort: tuple[str, ...] = ()  # the only devices of sums, under privacy.same_cohort; empty: there was no sum
    weights: Mapping[int, float] = {}  # by round, the weight of its updates together, where devices keep their embeddings
    summed: SummedChanges | None = None  # by the latest sum of secure aggregation
    releases: int = 0  # noisy sums that were released, or may have been, under client-level privacy
    likeliest: int = 0  # the round after which held-out samples were likeliest, under `round.patience`
    last: int = 0  # the last round, once the federation is to end early; 0: `round.rounds`
    # Buffered rounds:
    begun: Mapping[str, int] = {}  # device -> round of its training order, until its update is in the state
    arrived: tuple[str, ...] = ()  # those of them whose update is in the inbox, in the order of arrival
    last_begun: Mapping[str, int] = {}  # the same as `begun` of `last_cohort`
    discarded: int = 0  # updates that were too stale

    def revive(self) -> Record:
        """Return the record with the failed step open again; the record itself if none has failed."""
        return msgspec.structs.replace(self, phase=self.failed_in, reason="") if self.phase is Phase.FAILED else self

    @property
    def given_up_after(self) -> int:
        """The round after which the states up to `given_up` do not count. Reports about them do not count either."""
        return self.given_up - 1 if self.back_to < 0 else min(self.back_to, self.given_up)

    @property
    def oldest_kept(self) -> int:
        """The round after which the oldest state was made that is kept."""
        return min([self.round, *(state.round for state in self.earlier), *(number - 1 for number in self.begun.values())])

    @property
    def open_orders(self) -> tuple[WorkName, int]:
        """The work and the round of the orders that are out, or would be out if there were any."""
        if self.revive().phase in (Phase.EVALUATING, Phase.DONE):
            return "evaluate", self.round
        return "train", self.round + 1

    def order_of(self, name: str) -> OrderId:
        """Return the id of a device's order: the open one, or in buffered rounds the one that it got in an earlier round."""
        if name in self.begun:
            return OrderId("train", self.begun[name], name)
        return OrderId(*self.open_orders, name)

    @property
    def kept_orders(self) -> tuple[OrderId, ...]:
        """Training orders of buffered rounds whose updates the inbox keeps: those to come, and those of the last round."""
        return tuple(OrderId("train", number, name) for name, number in {*self.begun.items(), *self.last_begun.items()})


# --- orders


class OrderId(msgspec.Struct, frozen=True):
    """Id of an order. `work` is "train" (for the round `round`) or "evaluate" (the state after the round `round`)."""

    work: WorkName
    round: int
    client: str

    def __str__(self) -> str:
        return f"{self.work}-{self.round}-{self.client}"

    @classmethod
    def parse(cls, text: str, client: str) -> Self:
        """Parse an id that the device `client` sent.

        Raises:
            UpdateRefused: It is no order's id, or that of another device's order.
        """
        work, _, rest = text.partition("-")
        number, _, name = rest.partition("-")
        if work not in ("train", "evaluate") or not number.isascii() or not number.isdecimal() or len(number) > 9:
            raise UpdateRefused(f"{client} answered {text[:80]!r}, which is no order of this server")
        if name != client:
            raise UpdateRefused(f"{client} answered an order for another device: {text[:80]!r}")
        return cls(cast(WorkName, work), int(number), client)
