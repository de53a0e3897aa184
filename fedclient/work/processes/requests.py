"""Requests to a process that holds learners, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from attune.common.exchange.messages import Order
from attune.common.plan import Plan, Scale
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.orders import Holdings

if TYPE_CHECKING:
    from attune.fedclient.data.standardiser import Standardiser
    from attune.fedclient.work.objectives.base import Tensors
    from attune.fedclient.work.orders import OrderStore


class PlaceDevice(msgspec.Struct, frozen=True):
    """A device that is new to this process: its data, and the orders that it has carried out. Answer: LearnerState."""

    name: str
    plan: Plan
    shard: LazyShard
    orders: OrderStore
    options: DeviceOptions


class MakeReady(msgspec.Struct, frozen=True):
    """Make the learner of a device that was placed here. Answer: LearnerState."""

    name: str


class CarryOut(msgspec.Struct, frozen=True):
    """Carry out an order: the fields are those of Work. Answer: LearnerState, with the result as `newest`."""

    name: str
    order: Order
    fetched: Mapping[str, Tensors]
    bytes_down: int


class GetFinished(msgspec.Struct, frozen=True):
    """Return what `Learner.finished` returns. Answer: FinishedModels."""

    name: str


class ForgetAll(msgspec.Struct, frozen=True):
    """Forget all devices, because this process will serve another executor. Answer: Forgotten.

    Attributes:
        path: Folders in which Python finds code from now on.
    """

    path: tuple[str, ...]
    name: str = ""


HostRequest = PlaceDevice | MakeReady | CarryOut | GetFinished | ForgetAll


class LearnerState(msgspec.Struct, frozen=True):
    """State of a ready learner that its device needs to know."""

    holdings: Holdings
    standardiser: Standardiser | None
    targets: Scale | None
    size_bytes: int
    newest: OrderResult | None
    orders: OrderStore


class FinishedModels(msgspec.Struct, frozen=True):
    """Answer with the models with which the device predicts."""

    tensors: dict[str, Tensors]


class Forgotten(msgspec.Struct, frozen=True):
    """All devices are forgotten."""


class RequestFailed(msgspec.Struct, frozen=True):
    """The answer to a request that raised an error."""

    error: Exception


class WorkProgress(msgspec.Struct, frozen=True):
    """Sent before an answer: the share of the work that is done."""

    share: float


class GiveUpWork(msgspec.Struct, frozen=True):
    """Sent while an order is carried out: give it up."""


HostAnswer = LearnerState | FinishedModels | Forgotten | RequestFailed
