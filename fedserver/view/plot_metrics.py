"""Every metric by round: a panel for each metric in `METRICS` that a device has reported."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from attune.common.metrics import METRICS, reported_by
from attune.common.pictures import figures
from attune.common.pictures.page import Cell, Picture, Section, Table
from attune.fedserver.core.records import Report

COLUMNS = 3
MARKED = 60  # rounds that get a mark each
SERIES = {"train": ("training", figures.BEFORE), "evaluate": ("evaluation", figures.AFTER)}

ByRound = dict[int, list[float]]  # the clients' values, by the round that the row names


def by_round(rows: Iterable[Report]) -> dict[str, dict[str, ByRound]]:
    """Return metric -> work -> round -> values, for the metrics that are numbers and were reported."""
    metrics: dict[str, dict[str, ByRound]] = {name: {} for name in METRICS}
    for row in rows:
        for name, value in reported_by(row).items():
            if isinstance(value, int | float):
                metrics[name].setdefault(row.work, defaultdict(list))[row.round].append(value)
    return {name: works for name, works in metrics.items() if works}


def metrics(rows: Sequence[Report]) -> Section:
    """Means over clients as lines; the table has the smallest and largest value, too."""
    found = by_round(rows)
    across = min(COLUMNS, len(found))
    down = math.ceil(len(found) / across)
    figure, panels = figures.panels(down, across, len(found))
    table: list[list[Cell]] = []
    lines: dict[str, Any] = {}
    for axes, (name, works) in zip(panels, found.items(), strict=True):
        for work, rounds in sorted(works.items(), reverse=True):
            label, colour = SERIES[work]
            at = sorted(rounds)
            line = "-o" if len(at) <= MARKED else "-"
            lines[label] = axes.plot(at, [fmean(rounds[r]) for r in at], line, color=colour, markersize=3)[0]
            table += [[name, label, r, len(rounds[r]), fmean(rounds[r]), min(rounds[r]), max(rounds[r])] for r in at]
        axes.set_title(METRICS[name].heading, fontsize=9)
        figures.plain(axes)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("round", fontsize=10)
    figure.suptitle("What devices report, mean over clients", fontsize=12)
    figure.legend(list(lines.values()), list(lines), frameon=False, fontsize=9, loc="upper right", ncols=len(lines))
    caption = "Every number that devices report with their answers, averaged over the clients that have it."
    heads = ("metric", "order", "round", "clients", "mean", "smallest", "largest")
    return Section("Reports of the devices", caption, Picture("metrics", figures.png(figure)), Table(heads, table))
