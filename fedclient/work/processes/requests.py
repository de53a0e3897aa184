"""Requests to a process that holds learners, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attune.common.exchange.messages import Order
from attune.common.plan import Plan, Scale
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.orders import Holdings

if TYPE_CHECKING:
    from attune.fedclient.data.standardiser import Standardiser
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.trainer import Tensors


@dataclass(frozen=True)
class PlaceDevice:
    """A device that is new to this process: its data, and the orders that it has carried out. Answer: LearnerState."""

    name: str
    plan: Plan
    shard: LazyShard
    orders: OrderStore
    options: DeviceOptions


@dataclass(frozen=True)
class MakeReady:
    """Make the learner of a device that was placed here. Answer: LearnerState."""

    name: str


@dataclass(frozen=True)
class CarryOut:
    """Carry out an order: the fields are those of Work. Answer: LearnerState, with the result as `newest`."""

    name: str
    order: Order
    fetched: Mapping[str, Tensors]
    bytes_down: int


@dataclass(frozen=True)
class GetFinished:
    """Return what `Learner.finished` returns. Answer: FinishedModels."""

    name: str


@dataclass(frozen=True)
class ForgetAll:
    """Forget all devices, because this process will serve another executor. Answer: Forgotten.

    Attributes:
        path: Folders in which Python finds code from now on.
    """

    path: tuple[str, ...]
    name: str = ""


HostRequest = PlaceDevice | MakeReady | CarryOut | GetFinished | ForgetAll


@dataclass(frozen=True)
class LearnerState:
    """State of a ready learner that its device needs to know."""

    holdings: Holdings
    standardiser: Standardiser | None
    targets: Scale | None
    size_bytes: int
    newest: OrderResult | None
    orders: OrderStore


@dataclass(frozen=True)
class FinishedModels:
    """Answer with the models with which the device predicts."""

    tensors: dict[str, Tensors]


@dataclass(frozen=True)
class Forgotten:
    """All devices are forgotten."""


@dataclass(frozen=True)
class RequestFailed:
    """The answer to a request that raised an error."""

    error: Exception


@dataclass(frozen=True)
class WorkProgress:
    """Sent before an answer: the share of the work that is done."""

    share: float


@dataclass(frozen=True)
class GiveUpWork:
    """Sent while an order is carried out: give it up."""


HostAnswer = LearnerState | FinishedModels | Forgotten | RequestFailed
