"""What travels between the server's rooms: events and effects of the round, its record, and the ids of orders.

`now` is seconds of a monotonic clock, the same one in all events of a process. Times that people are shown are unix times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

import msgspec
from typing_extensions import Self

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import WorkName


class StrEnum(str, Enum):
    """As enum.StrEnum, which Python 3.10 does not have: `str`, `format` and `%` give the value."""

    __str__ = str.__str__


class Phase(StrEnum):
    WAITING = "waiting"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    EVALUATING = "evaluating"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Resumed:
    """The first event of a process; also after a failure, to try the step again."""

    now: float


@dataclass(frozen=True)
class Connected:
    """A device said Hello on a new stream."""

    name: str
    now: float
    newcomer: bool = False  # no update of it was ever taken in


@dataclass(frozen=True)
class Disconnected:
    name: str
    now: float


@dataclass(frozen=True)
class Reported:
    """A device's update (or evaluation) is durable in the inbox."""

    name: str
    round: int
    now: float
    work: str = "train"  # or "evaluate"
    loss: float | None = None  # of its training


@dataclass(frozen=True)
class DeviceProgressed:
    """A device says that it is further with its order."""

    name: str
    now: float


@dataclass(frozen=True)
class Excused:
    """A device cannot carry out its order, or its update was refused, or it was revoked."""

    name: str
    now: float
    troubled: bool = False  # it says itself that it cannot


@dataclass(frozen=True)
class Expelled:
    """The operator has shut a device out, for good."""

    name: str
    now: float


@dataclass(frozen=True)
class Paused:
    """The operator wants no further round to open, or (on is False) lets them open again."""

    on: bool
    now: float


@dataclass(frozen=True)
class Tick:
    now: float


@dataclass(frozen=True)
class Aggregated:
    """The new state is durable. setback: why it is not made of the cohort's updates; empty: it is."""

    now: float
    setback: str = ""


@dataclass(frozen=True)
class StepFailed:
    """The step that was under way cannot be carried out."""

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
    | StepFailed
)


@dataclass(frozen=True)
class Open:
    """Send orders: for training, or (work "evaluate") to evaluate the state after the closed `round`."""

    work: WorkName
    round: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Aggregate:
    round: int
    cohort: tuple[str, ...]


@dataclass(frozen=True)
class GoBack:
    """The state before the last round becomes the state again."""

    round: int
    why: str


@dataclass(frozen=True)
class FinishDevices:
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Acknowledge:
    """The answer to a device's update."""

    name: str
    accepted: bool


@dataclass(frozen=True)
class PassOver:
    """These devices let too many orders in a row run out: they are not asked before they have shown that they can."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class AskAgain:
    """These devices, which were passed over, have shown that they can."""

    devices: tuple[str, ...]


Effect = Open | Aggregate | GoBack | FinishDevices | Acknowledge | PassOver | AskAgain


def together(effects: Iterable[Effect]) -> list[Effect]:
    """The same effects; orders of one step that follow on each other are opened as one."""
    joined: list[Effect] = []
    for effect in effects:
        last = joined[-1] if joined else None
        if isinstance(effect, Open) and isinstance(last, Open) and (last.work, last.round) == (effect.work, effect.round):
            joined[-1] = replace(last, devices=(*last.devices, *effect.devices))
        else:
            joined.append(effect)
    return joined


class Record(msgspec.Struct, frozen=True):
    """What the ledger keeps. `round` counts closed rounds; `devices` hold orders, of whom `cohort` exchange weights.

    No deadline is kept: a restarted process has no monotonic past, so its deadline counts anew.
    """

    phase: Phase = Phase.WAITING
    round: int = 0
    devices: tuple[str, ...] = ()
    cohort: tuple[str, ...] = ()
    excused: tuple[str, ...] = ()  # hold an order and are not waited for
    replaced: tuple[str, ...] = ()  # were of the cohort and stayed away; what they hand in after all counts
    last_cohort: tuple[str, ...] = ()  # whose updates made the present state
    adapting: Mapping[str, int] = {}  # newcomers to the finished federation, and how many rounds each was given
    loss: float | None = None  # the median of the devices' losses in the last round that was taken in
    kept: bool = False  # the state before the last round is kept
    spoiled: str = ""  # why the open step ends with a return to the state before
    setback: str = ""  # the last round of which no update counts, and why
    given_up: int = 0  # the last round whose state was taken back: what devices said of that state counts no more; 0: none
    opened_at: float = 0.0  # unix time
    reason: str = ""  # of a failure
    failed_in: Phase = Phase.WAITING
    paused: bool = False  # no further training round opens before the operator says so

    def revive(self) -> Record:
        """After a failure: the step to try again."""
        return msgspec.structs.replace(self, phase=self.failed_in, reason="") if self.phase is Phase.FAILED else self

    @property
    def open_orders(self) -> tuple[WorkName, int]:
        """The work and the round of the orders that are (or would be) out."""
        if self.revive().phase in (Phase.EVALUATING, Phase.DONE):
            return "evaluate", self.round
        return "train", self.round + 1


# --- orders


@dataclass(frozen=True)
class OrderId:
    """`work` is "train" (for the round after the last closed one) or "evaluate" (of the state after `round`)."""

    work: WorkName
    round: int
    client: str

    def __str__(self) -> str:
        return f"{self.work}-{self.round}-{self.client}"

    @classmethod
    def parse(cls, text: str, client: str) -> Self:
        """Errors: UpdateRefused if this is no order, or one for another device than `client`."""
        work, _, rest = text.partition("-")
        number, _, name = rest.partition("-")
        if work not in ("train", "evaluate") or not number.isascii() or not number.isdecimal() or len(number) > 9:
            raise UpdateRefused(f"{client} answered {text[:80]!r}, which is no order of this server")
        if name != client:
            raise UpdateRefused(f"{client} answered an order for another device: {text[:80]!r}")
        return cls(cast(WorkName, work), int(number), client)
