"""How far a simulation is, for whoever waits for it: a bar with an estimate of the time left, or a function of one's own."""

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
Tell = Callable[[float], None]


class Watcher(Protocol):
    def begin(self, orders: int) -> None:
        """So many orders will be carried out."""

    def carried_out(self) -> None:
        """One more."""

    def end(self) -> None: ...


def watcher(given: bool | Tell | None) -> Watcher:
    """A function hears of each share; False is silence; else a bar on a terminal, and elsewhere a line now and then."""
    if callable(given):
        return Told(given)
    if given is False:
        return Told(lambda share: None)
    return Bar() if sys.stderr.isatty() else Told(_Lines())


class _Lines:
    """On stderr, if it takes long."""

    def __init__(self) -> None:
        self._estimate = Estimate()
        self._estimate.at(ORDERS, 0.0)

    def __call__(self, share: float) -> None:
        if line := self._estimate.at(ORDERS, share):
            to_stderr(line)


class Told:
    def __init__(self, tell: Tell) -> None:
        self._tell, self._orders, self._done = tell, 1, 0

    def begin(self, orders: int) -> None:
        self._orders = orders

    def carried_out(self) -> None:
        self._done += 1
        self._tell(min(1.0, self._done / self._orders))

    def end(self) -> None:
        """Nothing is held."""


class Bar:
    """On stderr."""

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

    def carried_out(self) -> None:
        self._done += 1
        if time.monotonic() - self._drawn_at >= DRAWN_EVERY_S:
            self._drawn_at = time.monotonic()
            self._bar.update(self._task, completed=self._done, refresh=True)

    def end(self) -> None:
        self._bar.update(self._task, completed=self._done, refresh=True)
        self._bar.stop()


def orders_of(settings: ResolvedSettings, devices: int, closed: int) -> int:
    """How many orders `devices` devices will carry out after `closed` rounds, if all goes well."""
    policy, rules = settings.round, settings.rules.policy
    sampled = math.ceil(min(devices, policy.clients or devices) * (1 + policy.over_selection))
    train = devices if policy.train == "all" else min(devices, sampled)
    return sum(train + devices * rules.evaluates(number) for number in range(closed + 1, policy.rounds + 1))
