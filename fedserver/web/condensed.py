"""All that devices have reported, in so little that it can be looked at again and again: lines of rounds, and latest rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attune.common.metrics import METRICS, MetricDescriptor
from attune.fedserver.core.records import Report

KEPT = ("accuracy_before", "accuracy_after", "accuracy_constant")  # of these the latest that there is counts


Totals = dict[str, float]  # sums over rounds, of the metrics of which each round has its own


@dataclass(frozen=True)
class RoundLine:
    """One round: who answered, and what they reported, combined over devices."""

    round: int
    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    before: float | None
    after: float | None
    accuracy: float | None  # of the evaluation of the state after this round
    common: float | None
    metrics: Mapping[str, float | None]  # those that each round has of its own, and those that the page draws as charts


def plus(totals: Totals, row: Report) -> Totals:
    """Return a device's totals with one more row."""
    return {name: totals.get(name, 0) + (getattr(row, name) or 0) for name, metric in METRICS.items() if metric.per == "round"}


class CondensedReports:
    """Rows are added in the order of time; those of the newest round may be added again."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str, str], Report] = {}  # (client, work, what it is kept for)
        self._open: dict[tuple[str, str], Report] = {}  # of the newest round
        self._closed: list[RoundLine] = []
        self._totals: dict[str, Totals] = {}  # by device, of closed rounds
        self.newest = 0

    def __repr__(self) -> str:
        return f"Condensed({self.newest} rounds, {len(self._latest)} rows)"

    def add(self, rows: Iterable[Report]) -> None:
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
    def rows(self) -> tuple[Report, ...]:
        """In the order of time: of each device those that say what is latest, in whatever sense."""
        found = {(row.round, row.work, row.client): row for row in self._latest.values()}
        return tuple(found[key] for key in sorted(found, key=lambda key: (key[0], key[1] != "train", key[2])))

    @property
    def totals(self) -> dict[str, Totals]:
        """Each device's totals over all rounds."""
        totals = dict(self._totals)
        for row in self._open.values():
            totals[row.client] = plus(totals.get(row.client, {}), row)
        return totals

    @property
    def lines(self) -> list[RoundLine]:
        """Of all rounds, the first first."""
        return [*self._closed, line_of(self.newest, self._open.values())] if self._open else list(self._closed)


def line_of(number: int, rows: Iterable[Report]) -> RoundLine:
    listed = sorted(rows, key=lambda row: row.client)
    trained = [row for row in listed if row.work == "train"]
    evaluated = [row for row in listed if row.work == "evaluate"]
    return RoundLine(
        round=number,
        trained=tuple(row.client for row in trained),
        evaluated=tuple(row.client for row in evaluated),
        before=_combined(trained, METRICS["accuracy_before"]),
        after=_combined(trained, METRICS["accuracy_after"]),
        accuracy=_combined(evaluated, METRICS["accuracy_before"]),
        common=_combined(evaluated, METRICS["accuracy_common"]),
        metrics={name: _combined(listed, metric) for name, metric in METRICS.items() if metric.chart or metric.per == "round"},
    )


def _combined(rows: list[Report], metric: MetricDescriptor) -> float | None:
    return metric.combined([value for row in rows if (value := getattr(row, metric.name)) is not None])
