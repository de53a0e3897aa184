"""A learner that lives in another process: what a device needs of it, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar, cast

from attune.common.errors import AttuneError
from attune.common.exchange.messages import BlobRef, Order
from attune.common.metrics import Choice
from attune.common.wire.header import Manifest
from attune.fedclient.data.prepare import Standardiser
from attune.fedclient.messages import Result
from attune.fedclient.work.processes.messages import CarryOut, Done, Finish, Finished, Held, Place, Raised, Request, Wake
from attune.fedclient.work.processes.pool import Seat
from attune.fedclient.work.trainer import Progress, Tensors
from attune.fedclient.work.worker import Died, Lost

T = TypeVar("T")
DEATHS = 3  # of the host, during one device's work: then it is the work that kills it


class Away:
    """Implements fedclient.work.worker.AnyLearner. Errors: those of make_learner; AttuneError if every host dies of it.

    The orders of `place` are kept up to date, so that another host can go on from there.
    """

    def __init__(self, seat: Seat, place: Place) -> None:
        self._seat, self._place = seat, place
        self.plan, self.name, self.orders = place.plan, place.name, place.orders
        self._held = self._wake()

    def __repr__(self) -> str:
        return f"<Away {self.name} at {self._seat.host}>"

    @property
    def newest(self) -> Result | None:
        return self._held.newest

    @property
    def standardiser(self) -> Standardiser | None:
        return self._held.standardiser

    @property
    def size_bytes(self) -> int:
        return self._held.size_bytes

    @property
    def thread(self) -> ThreadPoolExecutor:
        """On which to wait for it."""
        return self._seat.thread

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]:
        """As Learner.missing."""
        return self._held.holdings.missing(order)

    def carry_out(
        self, order: Order, fetched: Mapping[str, Tensors], bytes_down: int, progress: Progress, cancelled: Callable[[], bool]
    ) -> Result:
        """As Learner.carry_out. Errors: Lost too: then ask a new one what is missing, and let that carry it out."""
        done = cast(Done, self._asked(CarryOut(self.name, order, fetched, bytes_down), progress, cancelled))
        self._seat.deaths = 0
        self.orders.adopt(done.orders)
        holdings = replace(self._held.holdings, served=done.served)
        self._held = replace(self._held, holdings=holdings, size_bytes=done.size_bytes, newest=done.result)
        return done.result

    def finished(self) -> dict[Choice, Tensors]:
        """As Learner.finished."""
        return cast(Finished, self._surely(Finish(self.name))).tensors

    def let_go(self) -> None:
        """The learner goes. Its device stays where it is."""
        self._seat.host.drop(self.name)

    def _wake(self) -> Held:
        held = cast(Held, self._surely(Wake(self.name)))
        self.orders.adopt(held.orders)
        return held

    def _surely(self, request: Request) -> object:
        """The answer of this life of the host or a later one: such a request changes nothing, so it can be asked again."""
        while True:
            try:
                if self._seat.life != self._seat.host.life:
                    life = self._seat.host.life
                    self._asked(self._place, life=life)
                    self._seat.life = life
                return self._asked(request)
            except Lost:
                continue

    def _asked(
        self,
        request: Request,
        progress: Progress = lambda done: None,
        cancelled: Callable[[], bool] = lambda: False,
        life: int | None = None,
    ) -> object:
        seat = self._seat
        try:
            answer = seat.host.ask(seat.life if life is None else life, request, progress, cancelled)
        except Died as died:
            seat.deaths += 1
            if seat.deaths == DEATHS:
                raise AttuneError(f"{died}, {DEATHS} times in a row while it worked for {self.name}") from None
            raise
        if isinstance(answer, Raised):
            raise answer.error
        return answer
