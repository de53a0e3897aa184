"""Questions to devices on the event loop, and waits for their answers; among them those of an attempt of secure aggregation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from attune.common import aio
from attune.common.exchange.messages import FixedSurvivors, SecureMessage
from attune.common.faults import SERVER, fail_at
from attune.common.text import listed
from attune.fedserver.core.messages import Exchanged
from attune.fedserver.core.secure_policy import ExchangeWait
from attune.fedserver.federation.federation_state import FederationState

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Collector, Unmasking

LOG = logging.getLogger("fedserver")


class ExchangeAccount:
    """The fleet's paces and debts, as exchanges with devices read and extend them.

    Args:
        state: The state, whose round has them.
        handle: Takes an exchange in that is over.

    Attributes:
        clock: If it stands, all answers are waited for.
    """

    def __init__(self, state: FederationState, handle: Callable[[Exchanged], Coroutine[Any, Any, Any]]) -> None:
        self._state, self._handle, self.clock = state, handle, state.clock

    def left_s(self, wait: ExchangeWait, began: float) -> float:
        """Return for how many seconds an exchange still waits."""
        if not wait.pending or self.clock.stands:
            return float(len(wait.pending))
        now = self.clock.monotonic()
        return began + wait.patience_s(self._state.settings.round, self._state.round, now) - now

    async def close(self, wait: ExchangeWait, began: float) -> None:
        """Note an exchange that is over."""
        now, took = self.clock.monotonic(), wait.took if wait.kind else {}
        costs = wait.costs(self._state.settings.round, self._state.round, now - began, now)
        if (took or costs) and not self.clock.stands:
            await self._state.turns.take(lambda: self._handle(Exchanged(now, wait.kind, took, costs)))


class Exchanger:
    """Waits for devices' answers, to one question at a time, and the exchanges of the present attempt.

    Args:
        send: Sends a message to a device, if it is connected.
        account: The account of waits.
        kind: Before the names of exchanges among the fleet's paces.

    Attributes:
        collector: The present attempt; None: there is none, and answers are ignored.
        moved_at: When the present wait began, monotonic.
    """

    def __init__(self, send: Callable[[str, SecureMessage], None], account: ExchangeAccount, kind: str = "") -> None:
        self.collector: Collector | None = None
        self.moved_at = 0.0
        self._send, self._account, self._kind, self._changed = send, account, kind, asyncio.Event()
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
        self.moved_at, self._took, asked = self._account.clock.monotonic(), {}, frozenset(pending())
        for name in sorted(asked):
            ask(name)

        def wait() -> ExchangeWait:
            return ExchangeWait(kind, asked, frozenset(pending()), self._took, least, wait_s)

        while (left_s := self._account.left_s(wait(), self.moved_at)) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(None if self._account.clock.stands else left_s):
                    await self._changed.wait()
        await self._account.close(wait(), self.moved_at)

    def came(self, name: str) -> None:
        """Take note that a device's answer is here."""
        self._took.setdefault(name, self._account.clock.monotonic() - self.moved_at)
        self._changed.set()

    async def answers(self, wait_s: float) -> None:
        """Ask, and wait for the answers to the present exchange, `wait_s` at most."""
        collector = self.collector
        if collector is None:
            return
        kind = self._kind + collector.exchange
        await self.wait(lambda: collector.pending, collector.least, wait_s, self.ask_again, kind)
        if missing := sorted(collector.pending):
            LOG.warning("round %d: %s: no answer of %s", collector.occasion.round, collector.exchange, listed(missing))

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
            await self.answers(wait_s)
            exchange = collector.exchange
            if exchange == "unmasking":
                unmasking = collector.unmasking()
                fail_at(SERVER, number, "secure-unmasking")
                return unmasking
            collector.advance()
            if exchange == "masked" and collector.fixed is not None:
                await keep(collector.fixed)
            fail_at(SERVER, number, f"secure-{exchange}")

    def ask_again(self, name: str) -> None:
        """Ask a device again, if its answer is missing."""
        collector = self.collector
        if collector is not None and name in collector.pending:
            self._send(name, collector.request(name))

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
