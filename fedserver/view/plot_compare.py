"""Runs side by side as a picture and its page: accuracy by round, and every device in every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attune.common.metrics import METRICS
from attune.common.pictures import figures, page
from attune.common.pictures.page import Cell, PageTable, Picture, Section
from attune.fedserver.view import compare_text
from attune.fedserver.view.compare import ComparedRun, RunData

NAMED = 60  # devices whose names fit below the axis


def write(found: Sequence[ComparedRun], runs: Sequence[RunData], out: Path) -> list[str]:
    """compare.png and index.html into `out`; a line for each. Errors: SettingError without matplotlib, OSError."""
    sections = [_overview(found), _drawn(runs), _devices(runs), _reported(found)]
    return [str(path) for path in page.write(out, " and ".join(run.name for run in runs), sections)]


def _overview(found: Sequence[ComparedRun]) -> Section:
    first = found[0].name
    caption = " ".join(f"{compare_text.sentence(each.name, first, each.against_first)}." for each in found[1:])
    rows: list[list[Cell]] = [list(compare_text.line_of(each)) for each in found]
    return Section("Which run is better?", caption, None, PageTable(compare_text.HEADS, rows))


def _drawn(runs: Sequence[RunData]) -> Section:
    names = figures.natural(set().union(*(run.accuracies for run in runs)))
    first = runs[0].accuracies
    names.sort(key=lambda name: first.get(name, -1.0))  # stable: devices that are equal stay by name
    figure = figures.new(min(max(12.0, 7 + 0.25 * len(names)), 20.0), 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for number, run in enumerate(runs):
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        _curve(left, run, colour)
        at = [position for position, name in enumerate(names) if name in run.accuracies]
        values = [run.accuracies[names[position]] for position in at]
        right.plot(at, values, "o", color=colour, markersize=6 if len(names) <= NAMED else 3, alpha=0.85, label=run.name)
    left.set_xlabel("closed rounds")
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel(f"{len(names)} devices, by their {runs[0].summary.metric} in {runs[0].name}")
    right.set_xticks([])
    if len(names) <= NAMED:
        right.set_xticks(range(len(names)), figures.short(names), rotation=90, fontsize=8)
    for axes in (left, right):
        figures.plain(axes)
    figures.score_axis(left, runs[0].summary.task, ", mean over clients")
    figures.score_axis(right, runs[0].summary.task, " on the device's own test part")
    left.legend(frameon=False, loc="lower right")
    figure.suptitle(" and ".join(run.name for run in runs))
    caption = (
        "Left: accuracy by round, of the model by which each run's method is judged. Right: the latest accuracy of every "
        "device in every run."
    )
    return Section("Runs side by side", caption, Picture("compare", figures.png(figure)))


def _curve(axes: Any, run: RunData, colour: str) -> None:
    points = run.summary.curves.get(run.summary.judged, [])
    at, values = [point.round for point in points], [point.mean_over_clients for point in points]
    axes.plot(at, values, "-o", color=colour, markersize=3.5 if len(points) <= NAMED else 0, label=run.name)


def _devices(runs: Sequence[RunData]) -> Section:
    rows: list[list[Cell]] = [list(line) for line in compare_text.devices_of(runs)]
    return Section(
        "Every device", "Its latest accuracy in each run.", None, PageTable(("device", *(run.name for run in runs)), rows)
    )


def _reported(compared: Sequence[ComparedRun]) -> Section:
    rows: list[list[Cell]] = [
        [metric.heading, *(run.metrics.get(name) for run in compared)]
        for name, metric in METRICS.items()
        if any(name in run.metrics for run in compared)
    ]
    caption = "Each metric that devices report, as the mean over devices of what each reported last."
    return Section("Reports of the devices", caption, None, PageTable(("metric", *(run.name for run in compared)), rows))
