"""All that devices have reported, in so little that it can be looked at again and again: lines of rounds, and latest rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from attune.fedserver.core.records import Row

KEPT = ("accuracy_before", "accuracy_after", "accuracy_constant")  # of these the latest that there is counts


@dataclass(frozen=True)
class Line:
    """One round: who answered, and the means over those who did. Seconds are of the slowest device."""

    round: int
    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    loss: float | None
    before: float | None
    after: float | None
    accuracy: float | None  # of the evaluation of the state after this round
    common: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int


class Total(NamedTuple):
    """Of one device, over all rounds."""

    sent_bytes: int = 0
    fetched_bytes: int = 0
    work_s: float = 0.0

    def plus(self, row: Row) -> Total:
        return Total(
            self.sent_bytes + (row.bytes_up or 0), self.fetched_bytes + (row.bytes_down or 0), self.work_s + (row.seconds or 0)
        )


class Condensed:
    """Rows are added in the order of time; those of the newest round may be added again."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str, str], Row] = {}  # (client, work, what it is kept for)
        self._open: dict[tuple[str, str], Row] = {}  # of the newest round
        self._closed: list[Line] = []
        self._totals: dict[str, Total] = {}  # of closed rounds
        self.newest = 0

    def __repr__(self) -> str:
        return f"Condensed({self.newest} rounds, {len(self._latest)} rows)"

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.round > self.newest:
                if self._open:
                    self._closed.append(line_of(self.newest, self._open.values()))
                    self._totals = self.totals
                self._open, self.newest = {}, row.round
            self._open[row.work, row.client] = row
            for what in ("", *(name for name in KEPT if getattr(row, name) is not None)):
                self._latest[row.client, row.work, what] = row

    @property
    def rows(self) -> tuple[Row, ...]:
        """In the order of time: of each device those that say what is latest, in whatever sense."""
        found = {(row.round, row.work, row.client): row for row in self._latest.values()}
        return tuple(found[key] for key in sorted(found, key=lambda key: (key[0], key[1] != "train", key[2])))

    @property
    def totals(self) -> dict[str, Total]:
        found = dict(self._totals)
        for row in self._open.values():
            found[row.client] = found.get(row.client, Total()).plus(row)
        return found

    @property
    def lines(self) -> list[Line]:
        """Of all rounds, the first first."""
        return [*self._closed, line_of(self.newest, self._open.values())] if self._open else list(self._closed)


def line_of(number: int, rows: Iterable[Row]) -> Line:
    listed = sorted(rows, key=lambda row: row.client)
    trained = [row for row in listed if row.work == "train"]
    evaluated = [row for row in listed if row.work == "evaluate"]
    return Line(
        round=number,
        trained=tuple(row.client for row in trained),
        evaluated=tuple(row.client for row in evaluated),
        loss=_mean(trained, "loss"),
        before=_mean(trained, "accuracy_before"),
        after=_mean(trained, "accuracy_after"),
        accuracy=_mean(evaluated, "accuracy_before"),
        common=_mean(evaluated, "accuracy_common"),
        seconds=max((row.seconds for row in listed if row.seconds is not None), default=None),
        bytes_up=sum(row.bytes_up or 0 for row in listed),
        bytes_down=sum(row.bytes_down or 0 for row in listed),
    )


def _mean(rows: list[Row], name: str) -> float | None:
    found: list[Any] = [value for row in rows if (value := getattr(row, name)) is not None]
    return fmean(found) if found else None
