"""A learner that lives in another process, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from attune.common.errors import AttuneError
from attune.common.exchange.messages import BlobRef, Order
from attune.common.wire.header import Manifest
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import HostDied, HostLost, Work
from attune.fedclient.work.objectives.base import OnProgress, Tensors
from attune.fedclient.work.processes import requests
from attune.fedclient.work.processes.remote_executor import Placement

MAX_DEATHS = 3  # of the host, during one device's work: then the work kills it


class RemoteLearner:
    """Implements fedclient.work.executor.AnyLearner.

    The orders of `device` are kept up to date, so that another host can go on from there.

    Raises:
        AttuneError: Every host ended while it worked for this device. Errors of make_learner are raised too.
    """

    def __init__(self, placement: Placement, device: requests.PlaceDevice) -> None:
        self._placement, self._device = placement, device
        self.plan, self.name, self.orders = device.plan, device.name, device.orders
        self._update(cast(requests.LearnerState, self._ask_until_answered(requests.MakeReady(self.name))))

    @property
    def thread(self) -> ThreadPoolExecutor:
        """The thread on which to wait for its host."""
        return self._placement.thread

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """Return the missing values of an order, as Learner.missing."""
        return self._holdings.missing(order)

    def carry_out(self, work: Work) -> OrderResult:
        """Carry out an order, as Learner.carry_out. After HostLost a new learner must first say what is missing."""
        request = requests.CarryOut(self.name, work.order, work.fetched, work.bytes_down)
        self._update(cast(requests.LearnerState, self._ask(request, work.progress, work.cancelled)))
        self._placement.deaths = 0
        assert self.newest is not None  # noqa: S101 (an order was carried out)
        return self.newest

    def finished(self) -> dict[str, Tensors]:
        """Return what the device predicts with, as Learner.finished."""
        return cast(requests.FinishedModels, self._ask_until_answered(requests.GetFinished(self.name))).tensors

    def let_go(self) -> None:
        """Drop the learner. Its device stays where it was placed."""
        self._placement.host.drop(self.name)

    def _update(self, state: requests.LearnerState) -> None:
        self._holdings, self.newest = state.holdings, state.newest
        self.standardiser, self.targets, self.size_bytes = state.standardiser, state.targets, state.size_bytes
        self.orders.adopt(state.orders)

    def _ask_until_answered(self, request: requests.HostRequest) -> object:
        """Return the answer of this life of the host or of a later one: the request changes nothing, so it can be repeated."""
        while True:
            try:
                if self._placement.life != self._placement.host.life:
                    life = self._placement.host.life
                    self._ask(self._device, life=life)
                    self._placement.life = life
                return self._ask(request)
            except HostLost:
                continue

    def _ask(
        self,
        request: requests.HostRequest,
        progress: OnProgress = lambda done: None,
        cancelled: Callable[[], bool] = lambda: False,
        life: int | None = None,
    ) -> object:
        placement = self._placement
        try:
            answer = placement.host.ask(placement.life if life is None else life, request, progress, cancelled)
        except HostDied as died:
            placement.deaths += 1
            if placement.deaths == MAX_DEATHS:
                raise AttuneError(f"{died}, {MAX_DEATHS} times in a row while it worked for {self.name}") from None
            raise
        if isinstance(answer, requests.RequestFailed):
            raise answer.error
        return answer
