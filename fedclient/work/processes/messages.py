"""What is asked of a process that holds learners, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attune.common.exchange.messages import Order
from attune.common.metrics import Choice
from attune.common.plan import Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.messages import Result
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.holdings import Holdings

if TYPE_CHECKING:
    from attune.fedclient.data.prepare import Standardiser
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.trainer import Tensors


@dataclass(frozen=True)
class Place:
    """A device that is new here: its data, and the orders that it has carried out elsewhere. Answer: Held."""

    name: str
    plan: Plan
    shard: LazyShard
    orders: OrderStore
    options: DeviceOptions


@dataclass(frozen=True)
class Wake:
    """The learner of a device that was placed here. Answer: Held."""

    name: str


@dataclass(frozen=True)
class CarryOut:
    """As Learner.carry_out. Answer: Done."""

    name: str
    order: Order
    fetched: Mapping[str, Tensors]
    bytes_down: int


@dataclass(frozen=True)
class Finish:
    """As Learner.finished. Answer: Finished."""

    name: str


@dataclass(frozen=True)
class Clear:
    """All devices go: this process is to serve another pool. path: where code is found from now on. Answer: Cleared."""

    path: tuple[str, ...]
    name: str = ""


Request = Place | Wake | CarryOut | Finish | Clear


@dataclass(frozen=True)
class Held:
    """A learner that is there: what its device needs to know of it."""

    holdings: Holdings
    standardiser: Standardiser | None
    size_bytes: int
    newest: Result | None
    orders: OrderStore


@dataclass(frozen=True)
class Done:
    """orders: with all that another process needs to go on from here."""

    result: Result
    served: Mapping[str, str]
    size_bytes: int
    orders: OrderStore


@dataclass(frozen=True)
class Finished:
    tensors: dict[Choice, Tensors]


@dataclass(frozen=True)
class Cleared:
    """There is nothing left."""


@dataclass(frozen=True)
class Raised:
    """Instead of an answer."""

    error: Exception


@dataclass(frozen=True)
class Progressed:
    """Before an answer: the share of the work that is done."""

    share: float


@dataclass(frozen=True)
class Stop:
    """While something is carried out: it is to be given up."""


Answer = Held | Done | Finished | Cleared | Raised
