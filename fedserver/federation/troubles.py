"""Errors that can pass: the step is tried again with back-off, the operator is told, and the federation goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from attune.common.durable import NO_SPACE
from attune.common.errors import DiskFull, LedgerBusy

LOG = logging.getLogger("fedserver")
PASSING = (*NO_SPACE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 30.0

T = TypeVar("T")


def can_pass(error: BaseException) -> bool:
    """Whether the same step may succeed later without a restart: when a lock is let go, or somebody makes room."""
    return isinstance(error, (LedgerBusy, DiskFull)) or (isinstance(error, OSError) and error.errno in PASSING)


class Troubles:
    """What keeps a step from being carried out now, by the step's name."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Troubles({self._present})"

    @property
    def lines(self) -> list[str]:
        """A line for each, for people."""
        return [f"{step}: {text}" for step, text in sorted(self._present.items())]

    def set(self, step: str, text: str) -> None:
        """Said once in the log, however often it is set."""
        if self._present.get(step) != text:
            LOG.warning("%s: %s (trying again)", step, text)
        self._present[step] = text

    def clear(self, step: str) -> None:
        if self._present.pop(step, None) is not None:
            LOG.info("%s: goes on", step)

    async def overcome(self, step: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds. Errors: those of `attempt` that cannot pass."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                result = await attempt()
            except Exception as error:
                if not can_pass(error):
                    raise
                self.set(step, str(error))
            else:
                self.clear(step)
                return result
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
