"""Facts of a federation that the page shows, condensed so that looking often is cheap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attune.common.metrics import METRICS, MetricDescriptor
from attune.fedserver.core.records import Report
from attune.fedserver.federation.streams import Span

KEPT = ("accuracy_before", "accuracy_after", "accuracy_constant")  # metrics whose latest value counts, however old it is

Totals = dict[str, float]  # sums over rounds of the metrics with per="round"
Kind = Literal["server", "standby", "home", "simulation"]


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


@dataclass(frozen=True)
class LoggedFault:
    """Warning or error of the server's log. at: unix time."""

    at: float
    level: str
    text: str


@dataclass(frozen=True)
class HomeFacts:
    """Facts of the home in which a federation lies."""

    name: str = ""  # the setting `server.name`
    fingerprint: str = ""  # short form of the authority's key
    run: str = ""
    disk_free_bytes: int | None = None
    backup_at: float | None = None  # unix time of the last `fedserver backup`; None: none was ever made
    needs_backup: bool = False  # whether `fedserver backup` is what copies its state: it is in the folder


@dataclass(frozen=True)
class PageFacts:
    """Facts of a federation at one moment."""

    kind: Kind
    status: Mapping[str, Any]  # the object of `fedserver status --json`
    lines: Sequence[RoundLine]
    totals: Mapping[str, Totals] = field(default_factory=dict)  # by device
    expires: Mapping[str, float] = field(default_factory=dict)  # unix time of the end of each device's newest certificate
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)  # activity of devices in this process
    faults: Sequence[LoggedFault] = ()  # the latest ones
    fault_totals: Mapping[str, int] = field(default_factory=dict)  # number of all, by level
    round_s: float | None = None  # mean time of a round
    opened_at: float = 0.0  # unix time at which the open round, or the last one, was opened; 0: none was
    home: HomeFacts = HomeFacts()


@dataclass(frozen=True)
class AttentionMatrix:
    """Matrix of which device learned from which: row i has the weights with which device i's value was mixed.

    `why`: the reason why there is no matrix.
    """

    names: Sequence[str]
    matrix: Sequence[Sequence[float]]
    units: Sequence[str]
    unit: str
    why: str = ""
