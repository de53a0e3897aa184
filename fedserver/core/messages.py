"""What travels between the server's rooms: events and effects of the round, its record, orders, and what devices are told.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import msgspec

from attune.common.config import RoundSettings
from attune.common.errors import UpdateRefused
from attune.common.plan import Plan


class Phase(StrEnum):
    WAITING = "waiting"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    EVALUATING = "evaluating"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Connected:
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


@dataclass(frozen=True)
class Excused:
    """A device cannot carry out its order, or its update was refused, or it was revoked."""

    name: str
    now: float


@dataclass(frozen=True)
class Tick:
    now: float


@dataclass(frozen=True)
class Aggregated:
    """The new state is durable."""

    now: float


@dataclass(frozen=True)
class Failed:
    """The step that was under way cannot be carried out."""

    reason: str


Event = Connected | Disconnected | Reported | Excused | Tick | Aggregated | Failed


@dataclass(frozen=True)
class Open:
    """Send orders: for training, or (work "evaluate") to evaluate the state after the closed `round`."""

    work: str
    round: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Aggregate:
    round: int
    cohort: tuple[str, ...]


@dataclass(frozen=True)
class Finish:
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Receipt:
    name: str
    accepted: bool


Effect = Open | Aggregate | Finish | Receipt


class Record(msgspec.Struct):
    """What the store keeps. `round` counts closed rounds; `devices` hold orders, of whom `cohort` exchange weights."""

    phase: Phase = Phase.WAITING
    round: int = 0
    devices: list[str] = []
    cohort: list[str] = []
    excused: list[str] = []
    last_cohort: list[str] = []  # whose updates made the present state
    adapting: dict[str, int] = {}  # newcomers to the finished federation, and how many rounds each was given
    opened_at: float = 0.0
    deadline: float = 0.0
    reason: str = ""  # of a failure
    failed_in: Phase = Phase.WAITING

    def revive(self) -> Record:
        """After a failure: the step to try again."""
        return msgspec.structs.replace(self, phase=self.failed_in, reason="") if self.phase is Phase.FAILED else self

    @property
    def open_orders(self) -> tuple[str, int]:
        """The work and the round of the orders that are (or would be) out."""
        if self.phase in (Phase.EVALUATING, Phase.DONE):
            return "evaluate", self.round
        return "train", self.round + 1


def quorum_of(policy: RoundSettings, record: Record) -> int:
    """Updates without which a round is not aggregated: never more than are sampled, or (with over-selection) than count."""
    cohort = len(record.cohort)
    return min(1, cohort) if record.adapting else min(policy.quorum or policy.min_clients, cohort, policy.clients or cohort)


# --- orders and updates


@dataclass(frozen=True)
class OrderId:
    """`work` is "train" (for the round after the last closed one) or "evaluate" (of the state after `round`)."""

    work: str
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
        return cls(work, int(number), client)


@dataclass(frozen=True)
class BlobRef:
    """One part's tensors, by the digest of their bytes.

    version: how many rounds were closed when the value was made; of an update, that of the value its training began from.
    """

    part: str
    digest: str
    size: int  # bytes
    version: int
    encoding: str = ""  # of the tensors; empty: safetensors


@dataclass(frozen=True)
class Order:
    """One piece of work for one device. trains: the kinds of tensors that move in training; none named: all."""

    id: OrderId
    deadline_s: float  # left when it is sent
    downloads: tuple[BlobRef, ...] = ()
    returns: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()
    cold_start: tuple[BlobRef, ...] = ()


@dataclass(frozen=True)
class Update:
    """What a device hands in: its order's id as it said it, and the parts that it has uploaded."""

    order_id: str
    parts: tuple[BlobRef, ...]
    samples: int
    metrics_json: bytes  # common.metrics.Metrics, not read yet


@dataclass(frozen=True)
class Welcome:
    """What the federation has fixed."""

    plan: Plan


@dataclass(frozen=True)
class Notice:
    """Something for the person at the device."""

    text: str


@dataclass(frozen=True)
class Farewell:
    """The last state is durable and evaluated: the device keeps its model and goes."""

    text: str


ToDevice = Welcome | Notice | Order | Farewell
