"""One attempt of secure aggregation on the event loop: its devices are asked, and their answers are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from attune.common import aio
from attune.common.config import RoundSettings
from attune.common.exchange.messages import SecureMessage
from attune.common.text import listed
from attune.fedserver.core.messages import Exchanged
from attune.fedserver.core.secure_policy import ExchangeWait
from attune.fedserver.core.state import Round
from attune.fedserver.federation.steps import Clock, Turns

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Collector

LOG = logging.getLogger("fedserver")


class ExchangeAccount:
    """The fleet's paces and debts, as exchanges read and extend them.

    Args:
        settings: The section [round].
        state: Returns the round, which has them.
        turns: The queue of steps.
        handle: Takes an exchange in that is over.
    """

    def __init__(
        self,
        settings: RoundSettings,
        state: Callable[[], Round],
        turns: Turns,
        handle: Callable[[Exchanged], Coroutine[Any, Any, Any]],
    ) -> None:
        self._settings, self._state, self._turns, self._handle = settings, state, turns, handle

    def patience_s(self, wait: ExchangeWait, now: float) -> float:
        """Return for how many seconds from its beginning an exchange waits."""
        return wait.patience_s(self._settings, self._state(), now)

    async def close(self, wait: ExchangeWait, waited_s: float, now: float) -> None:
        """Note an exchange that is over after so many seconds."""
        event = Exchanged(now, wait.kind, wait.took, wait.costs(self._settings, self._state(), waited_s, now))
        await self._turns.take(lambda: self._handle(event))


class Exchanger:
    """Exchanges of the present attempt.

    Args:
        send: Sends a message to a device, if it is connected.
        clock: If it stands, all answers are waited for.
        account: The account of waits; None: exchanges wait for as long as they may.
        kind: Before the names of exchanges among the fleet's paces.

    Attributes:
        collector: The present attempt; None: there is none, and answers are ignored.
        moved_at: When its present exchange began, monotonic.
    """

    def __init__(
        self,
        send: Callable[[str, SecureMessage], None],
        clock: Clock,
        account: ExchangeAccount | None = None,
        kind: str = "",
    ) -> None:
        self.collector: Collector | None = None
        self.moved_at = 0.0
        self._send, self._clock, self._changed = send, clock, asyncio.Event()
        self._account, self._kind = account, kind
        self._took: dict[str, float] = {}  # seconds for the answers to the present exchange

    async def answers(self, wait_s: float) -> None:
        """Ask, and wait until each device has answered, or the others are waited for no longer: `wait_s` at most."""
        collector = self.collector
        if collector is None:
            return
        self.moved_at, self._took, asked = self._clock.monotonic(), {}, collector.pending
        for name in sorted(asked):
            self._send(name, collector.request(name))

        def wait() -> ExchangeWait:
            kind = self._kind + collector.exchange
            return ExchangeWait(kind, asked, collector.pending, self._took, collector.least, wait_s)

        while (left_s := self._left_s(wait())) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(None if self._clock.stands else left_s):
                    await self._changed.wait()
        if missing := sorted(collector.pending):
            LOG.warning("round %d: %s: no answer of %s", collector.occasion.round, collector.exchange, listed(missing))
        if self._account is not None and not self._clock.stands:
            now = self._clock.monotonic()
            await self._account.close(wait(), now - self.moved_at, now)

    def _left_s(self, wait: ExchangeWait) -> float:
        """Return for how many seconds the exchange still waits."""
        if not wait.pending or self._clock.stands:
            return float(len(wait.pending))
        now = self._clock.monotonic()
        patience_s = wait.longest_s if self._account is None else self._account.patience_s(wait, now)
        return self.moved_at + patience_s - now

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
                self._took[name] = self._clock.monotonic() - self.moved_at
        finally:
            self._changed.set()

    def masked(self, name: str) -> None:
        """Take note that what a device has masked is here."""
        if self.collector is not None:
            self.collector.masked(name)
            self._took.setdefault(name, self._clock.monotonic() - self.moved_at)
            self._changed.set()

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        if self.collector is not None:
            self.collector.drop(name, why)
            self._changed.set()
