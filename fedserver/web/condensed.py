"""Condensed reports of all devices: a line for each round and the latest reports, so that looking often is cheap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attune.common.metrics import METRICS, MetricDescriptor
from attune.fedserver.core.records import Report

KEPT = ("accuracy_before", "accuracy_after", "accuracy_constant")  # metrics whose latest value counts, however old it is

Totals = dict[str, float]  # sums over rounds of the metrics with per="round"


@dataclass(frozen=True)
class RoundLine:
    """One round: the devices that answered, and their metrics combined over devices."""

    round: int
    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    before: float | None
    after: float | None
    accuracy: float | None  # in the evaluation of the state after this round
    common: float | None
    alone: float | None
    kept: float | None
    metrics: Mapping[str, float | None]  # metrics with per="round" or with a chart


def plus(totals: Totals, row: Report) -> Totals:
    """Return a device's totals with one more row."""
    return {name: totals.get(name, 0) + (getattr(row, name) or 0) for name, metric in METRICS.items() if metric.per == "round"}


class CondensedReports:
    """Reports that are added in the order of time; those of the newest round may be added again."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str, str], Report] = {}  # by (client, work, metric for which it is kept; "": any)
        self._open: dict[tuple[str, str], Report] = {}  # reports of the newest round
        self._closed: list[RoundLine] = []
        self._totals: dict[str, Totals] = {}  # by device, over closed rounds
        self.newest = 0

    def add(self, rows: Iterable[Report]) -> None:
        """Add reports."""
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
        """Reports in the order of time that together contain the latest value of every metric of each device."""
        rows_by_key = {(row.round, row.work, row.client): row for row in self._latest.values()}
        return tuple(rows_by_key[key] for key in sorted(rows_by_key, key=lambda key: (key[0], key[1] != "train", key[2])))

    @property
    def totals(self) -> dict[str, Totals]:
        """Each device's totals over all rounds."""
        totals = dict(self._totals)
        for row in self._open.values():
            totals[row.client] = plus(totals.get(row.client, {}), row)
        return totals

    @property
    def lines(self) -> list[RoundLine]:
        """Lines of all rounds, in their order."""
        return [*self._closed, line_of(self.newest, self._open.values())] if self._open else list(self._closed)


def line_of(number: int, rows: Iterable[Report]) -> RoundLine:
    """Return the line of a round from its reports."""
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
        alone=_combined(evaluated, METRICS["accuracy_alone"]),
        kept=_combined(evaluated, METRICS["accuracy_kept"]),
        metrics={name: _combined(listed, metric) for name, metric in METRICS.items() if metric.chart or metric.per == "round"},
    )


def _combined(rows: list[Report], metric: MetricDescriptor) -> float | None:
    return metric.combined([value for row in rows if (value := getattr(row, metric.name)) is not None])
