"""Progress of a simulation, and its dashboard.

Progress is a bar with an estimate of the remaining time, lines on stderr, or a function of the caller. The dashboard is a
server's page, without buttons.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attune.common.estimate import Estimate, to_stderr
from attune.fedserver.core.planning import ResolvedSettings

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

DRAWN_EVERY_S = 0.1
ORDERS = "orders"
ProgressFunction = Callable[[float], None]  # takes the share of the work that is done, 0 to 1


class Watcher(Protocol):
    """Display of the progress of a simulation."""

    def begin(self, orders: int) -> None:
        """Begin, with the number of orders that devices will carry out."""

    def order_done(self) -> None:
        """Count one more order."""

    def end(self) -> None: ...


def watcher(given: bool | ProgressFunction | None) -> Watcher:
    """Return the display of the progress.

    Args:
        given: A function that is called with every new share, or False for silence. Otherwise it is a bar on a terminal, and
            a line now and then elsewhere.
    """
    if callable(given):
        return CallbackWatcher(given)
    if given is False:
        return CallbackWatcher(lambda share: None)
    return ProgressBar() if sys.stderr.isatty() else CallbackWatcher(_stderr_lines())


def _stderr_lines() -> ProgressFunction:
    """Return a function that writes a line to stderr now and then, if the simulation takes long."""
    estimate = Estimate()
    estimate.at(ORDERS, 0.0)

    def show(share: float) -> None:
        if line := estimate.at(ORDERS, share):
            to_stderr(line)

    return show


class CallbackWatcher:
    """Watcher that calls a function with the share of the work that is done."""

    def __init__(self, function: ProgressFunction) -> None:
        self._function, self._orders, self._done = function, 1, 0

    def begin(self, orders: int) -> None:
        self._orders = orders

    def order_done(self) -> None:
        self._done += 1
        self._function(min(1.0, self._done / self._orders))

    def end(self) -> None:
        """No-op: there is nothing to close."""


class ProgressBar:
    """Watcher that draws a bar on stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar: RichProgress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task(ORDERS, total=None)
        self._done, self._drawn_at = 0, -math.inf

    def begin(self, orders: int) -> None:
        self._bar.update(self._task, total=orders)
        self._bar.start()

    def order_done(self) -> None:
        self._done += 1
        if time.monotonic() - self._drawn_at >= DRAWN_EVERY_S:
            self._drawn_at = time.monotonic()
            self._bar.update(self._task, completed=self._done, refresh=True)

    def end(self) -> None:
        self._bar.update(self._task, completed=self._done, refresh=True)
        self._bar.stop()


def orders_of(settings: ResolvedSettings, devices: int, closed: int) -> int:
    """Return the number of orders that `devices` devices will carry out after `closed` rounds, if all goes well."""
    policy, rules = settings.round, settings.rules.policy
    sampled = math.ceil(min(devices, policy.clients or devices) * (1 + policy.over_selection))
    cohort = policy.buffer if policy.mode == "buffered" else sampled
    train = devices if policy.train == "all" else min(devices, cohort)
    last = policy.rounds if settings.until is None else settings.until
    return sum(train + devices * rules.evaluates(number) for number in range(closed + 1, last + 1))
