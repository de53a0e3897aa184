"""Console of a hosted fleet: lines with the device's name. Devices that print the same share a line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attune.fedclient.console import Console, line_of

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult

FEW = 5  # up to this number of devices, each prints its own lines
GATHER_S = 1.0  # equal lines within this time become one


class FleetConsole:
    """The devices `labels` on one screen. After `ended(label)` no summary waits for that device."""

    def __init__(self, screen: Console, labels: Iterable[str]) -> None:
        self.screen = screen
        self.alive = set(labels)
        self.few = len(self.alive) <= FEW
        self._waiting: list[tuple[str, str]] = []
        self._results: dict[tuple[int, bool], dict[str, OrderResult]] = {}  # (round, evaluated after it) -> device -> result

    def __repr__(self) -> str:
        return f"<FleetConsole of {len(self.alive)}>"

    def console_of(self, label: str) -> DeviceConsole:
        """Return the console of one device."""
        return DeviceConsole(self, label)

    def say(self, label: str, text: str) -> None:
        """Print a line at once for few devices; else within GATHER_S, together with devices that print the same."""
        if self.few:
            self.screen.say(f"{label}: {text}")
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(GATHER_S, self._flush_waiting)
        self._waiting.append((label, text))

    def result(self, label: str, result: OrderResult) -> None:
        """Print a result at once for few devices; else when all have reported the round, or one has reported a later round."""
        if self.few:
            self.screen.say(f"{label}: {line_of(result)}")
            return
        key = (result.round, not result.trained)
        for earlier in [other for other in self._results if other < key]:
            self._flush_results(earlier)
        self._results.setdefault(key, {})[label] = result
        self._flush_complete()

    def progress(self, what: str, done: float) -> None:
        """Show the fleet's progress in the round of the device that is working."""
        counted = len(self._results[max(self._results)]) if self._results else 0
        self.screen.progress(what, done if self.few else min(1.0, (counted + done) / max(1, len(self.alive))))

    def ended(self, label: str) -> None:
        self.alive.discard(label)
        self._flush_complete()

    def flush(self) -> None:
        """Print all lines that still wait for others."""
        self._flush_waiting()
        for key in sorted(self._results):
            self._flush_results(key)

    def _flush_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for line in agreeing(waiting):
            self.screen.say(line)

    def _flush_complete(self) -> None:
        for key in [key for key, results in self._results.items() if self.alive <= results.keys()]:
            self._flush_results(key)

    def _flush_results(self, key: tuple[int, bool]) -> None:
        self.screen.say(line_of_all(self._results.pop(key)))


class DeviceConsole(Console):
    """The console of one device of the fleet."""

    def __init__(self, console: FleetConsole, label: str) -> None:
        self.console, self.label = console, label
        self.last: OrderResult | None = None

    def say(self, text: str) -> None:
        self.console.say(self.label, text)

    def result(self, result: OrderResult) -> None:
        self.console.result(self.label, result)

    def kept(self, message: str, result: OrderResult, path: Path | None) -> None:
        # The table at the end shows it for all devices.
        self.last = result

    def progress(self, what: str, done: float) -> None:
        self.console.progress(what, done)


def agreeing(lines_of: Iterable[tuple[str, str]]) -> list[str]:
    """Return (name, text) pairs as lines.

    Texts that differ only in the name and in numbers become one line with their count.
    """
    groups: dict[str, dict[str, str]] = {}
    for name, text in lines_of:
        groups.setdefault(re.sub(r"\d+", "0", text.replace(name, "NAME")), {})[name] = text
    lines = []
    for texts in groups.values():
        name, text = list(texts.items())[-1]
        lines.append(f"{name}: {text}" if len(texts) == 1 else f"{len(texts)} devices, such as {name}: {text}")
    return lines


def line_of_all(results: Mapping[str, OrderResult]) -> str:
    """Return a line with means over the devices that have a value.

    An example is `round 3  100 devices  loss 0.41  accuracy 0.93 -> 0.97`.
    """
    import msgspec

    listed = list(results.values())
    means = {
        field: _mean([value for value in (getattr(result, field) for result in listed) if value is not None])
        for field in ("loss", "accuracy_before", "accuracy_after")
    }
    count = f"{len(listed)} device{'s' if len(listed) > 1 else ''}"
    return line_of(msgspec.structs.replace(listed[0], **means), count)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
