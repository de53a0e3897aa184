"""One attempt of secure aggregation on the event loop: its devices are asked, and their answers are waited for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from attune.common import aio
from attune.common.exchange.messages import SecureMessage
from attune.common.text import listed
from attune.fedserver.federation.steps import Clock

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Collector

LOG = logging.getLogger("fedserver")


class Exchanger:
    """Exchanges of the present attempt.

    Args:
        send: Sends a message to a device, if it is connected.
        clock: If it stands, all answers are waited for.

    Attributes:
        collector: The present attempt; None: there is none, and answers are ignored.
        moved_at: When its present exchange began, monotonic.
    """

    def __init__(self, send: Callable[[str, SecureMessage], None], clock: Clock) -> None:
        self.collector: Collector | None = None
        self.moved_at = 0.0
        self._send, self._clock, self._changed = send, clock, asyncio.Event()

    async def answers(self, wait_s: float) -> None:
        """Ask, and wait until each device has answered or the time is over."""
        collector = self.collector
        if collector is None:
            return
        self.moved_at = self._clock.monotonic()
        for name in sorted(collector.pending):
            self._send(name, collector.request(name))
        try:
            async with aio.timeout(None if self._clock.stands else wait_s):
                while collector.pending:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(collector.pending)
            LOG.warning("round %d: %s: no answer of %s", collector.occasion.round, collector.exchange, listed(missing))

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
            if self.collector is not None:
                self.collector.take(name, message)
        finally:
            self._changed.set()

    def masked(self, name: str) -> None:
        """Take note that what a device has masked is here."""
        if self.collector is not None:
            self.collector.masked(name)
            self._changed.set()

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        if self.collector is not None:
            self.collector.drop(name, why)
            self._changed.set()
