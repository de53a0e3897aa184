"""Questions to devices on the event loop, and waits for their answers; among them those of an attempt of secure aggregation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from attune.common import aio
from attune.common.exchange.messages import FixedSurvivors, SecureMessage
from attune.common.faults import SERVER, fail_at
from attune.common.text import listed
from attune.fedserver.core.messages import Exchanged
from attune.fedserver.core.secure_policy import ExchangeWait
from attune.fedserver.federation.federation_state import FederationState, Handle

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Collector, Unmasking

LOG = logging.getLogger("fedserver")


class Exchanger:
    """Waits for devices' answers, to one question at a time, and the exchanges of the present attempt.

    Args:
        state: The federation, whose round has the fleet's paces and debts. If its clock stands, all answers are waited for.
        handle: Takes an exchange in that is over.
        kind: Before the names of exchanges among the fleet's paces.

    Attributes:
        collector: The present attempt; None: there is none, and answers are ignored.
        moved_at: When the present wait began, monotonic.
    """

    def __init__(self, state: FederationState, handle: Handle, kind: str = "") -> None:
        self.collector: Collector | None = None
        self.moved_at = 0.0
        self._state, self._handle, self._kind, self._changed = state, handle, kind, asyncio.Event()
        self._took: dict[str, float] = {}  # seconds for the answers to the present question

    async def wait(
        self, pending: Callable[[], Collection[str]], least: int, wait_s: float, ask: Callable[[str], None], kind: str = ""
    ) -> None:
        """Ask, and wait until each device has answered, or the others are waited for no longer.

        Args:
            pending: Returns the devices whose answer is missing. At first they are those to ask.
            least: How many answers are of use.
            wait_s: Seconds to wait at most.
            ask: Asks a device.
            kind: Name of the question among the fleet's paces; empty: it has none, for the next one may take far longer.
        """
        state, clock = self._state, self._state.clock
        self.moved_at, self._took, asked = clock.monotonic(), {}, frozenset(pending())
        for name in sorted(asked):
            ask(name)
        while True:
            self._changed.clear()
            wait, now = ExchangeWait(kind, asked, frozenset(pending()), self._took, least, wait_s), clock.monotonic()
            patience_s = math.inf if clock.stands else wait.patience_s(state.settings.round, state.round, now)
            if not wait.pending or (left_s := self.moved_at + patience_s - now) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(None if clock.stands else left_s):
                    await self._changed.wait()
        costs, took = wait.costs(state.settings.round, state.round, now - self.moved_at, now), self._took if kind else {}
        if (took or costs) and not clock.stands:
            await state.turns.take(lambda: self._handle(Exchanged(now, kind, took, costs)))

    def came(self, name: str) -> None:
        """Take note that a device's answer is here."""
        self._took.setdefault(name, self._state.clock.monotonic() - self.moved_at)
        self._changed.set()

    async def carried_out(
        self, collector: Collector, wait_s: float, number: int, keep: Callable[[FixedSurvivors], Coroutine[Any, Any, Any]]
    ) -> Unmasking:
        """Carry an attempt out, and return what takes the masks off its sum.

        Args:
            collector: The attempt.
            wait_s: Seconds that each exchange waits at most.
            number: Round of the attempt; 0: it is for statistics.
            keep: Makes the survivors durable, before any device is asked about them.

        Raises:
            UpdateRefused: Too few devices have answered.
        """
        self.collector = collector
        while True:
            exchange = collector.exchange
            await self.wait(lambda: collector.pending, collector.least, wait_s, self.connected, self._kind + exchange)
            if missing := sorted(collector.pending):
                LOG.warning("round %d: %s: no answer of %s", collector.occasion.round, exchange, listed(missing))
            if exchange == "unmasking":
                unmasking = collector.unmasking()
                fail_at(SERVER, number, "secure-unmasking")
                return unmasking
            collector.advance()
            if exchange == "masked" and collector.fixed is not None:
                await keep(collector.fixed)
            fail_at(SERVER, number, f"secure-{exchange}")

    def send(self, name: str, message: SecureMessage) -> None:
        """Send a message to a device, if it is connected."""
        self._state.streams.send(name, message)

    def connected(self, name: str) -> None:
        """Ask a device, or again if it has a new stream, if its answer is missing."""
        collector = self.collector
        if collector is not None and name in collector.pending:
            self.send(name, collector.request(name))

    def answered(self, name: str, message: SecureMessage) -> None:
        """Take a device's answer in.

        Raises:
            UpdateRefused: It refuses, or its answer cannot be; it takes no part any more.
        """
        try:
            if self.collector is not None and self.collector.take(name, message):
                self.came(name)
        finally:
            self._changed.set()

    def masked(self, name: str) -> None:
        """Take note that what a device has masked is here."""
        if self.collector is not None:
            self.collector.masked(name)
            self.came(name)

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        if self.collector is not None:
            self.collector.drop(name, why)
            self._changed.set()
