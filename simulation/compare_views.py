"""Compared runs as text, and as a picture with its page: accuracy by round, and every device in every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attune.common.metrics import METRICS
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, Format, PageTable, Picture, Section, natural
from attune.fedserver.view.homes import share, text_of, text_table
from attune.simulation.compare import AgainstFirst, ComparedRun, RunData

SHOWN = 60  # devices; --json and the page have them all
NAMED = 60  # devices whose names fit below the axis


def render(compared: Sequence[ComparedRun], runs: Sequence[RunData]) -> str:
    """Return a line for each run, then a line for each device, as text."""
    listed = devices_of(runs)
    tables = text_table(*_overview_of(compared)), text_table(("device", *(run.name for run in runs)), listed[:SHOWN])
    notes = [f"... and {len(listed) - SHOWN} more devices: --json and --out have them all"] if len(listed) > SHOWN else []
    if beaten := [run.name for run in compared if run.no_better]:
        notes.append(f"no better than a constant answer over clients: {', '.join(beaten)}")
    notes += sentences(compared)
    return text_of(tables[0], "", tables[1], *notes)


def _overview_of(compared: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """Return heads, and the cells of each run; a score that no run has gets no column."""
    lines = [_cells(run) for run in compared]
    heads = [head for head in lines[0] if head not in ("kept", "alone") or any(line[head] != "-" for line in lines)]
    return heads, [[line[head] for head in heads] for line in lines]


def _cells(run: ComparedRun) -> dict[str, str]:
    """Return the cells of a run by their heads."""
    known = sum(run.verdicts.values())
    return {
        "run": run.name,
        "method": run.method,
        "model": run.model or "-",
        "rounds": f"{run.closed}/{run.rounds}",
        "devices": str(run.devices),
        "over clients": share(run.mean_over_clients),
        "over samples": share(run.over_samples),
        "kept": share(run.metrics.get("accuracy_kept")),
        "alone": share(run.metrics.get("accuracy_alone")),
        "constant": share(run.constant),
        "helped": f"{run.verdicts.get('better', 0)} of {known}" if known else "-",
        "gives": "-" if run.gives is None else f"{run.gives:+.4f}",
        "moved": f"{run.bytes / 1e6:.2f} MB",
        "seconds": "-" if run.slowest_s is None else f"{run.slowest_s:.1f}",
    }


def devices_of(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Return a line for each device of any run, with its accuracy in every run."""
    accuracies = [run.accuracies for run in runs]
    return [(name, *(share(of_run.get(name)) for of_run in accuracies)) for name in natural(set().union(*accuracies))]


def sentences(compared: Sequence[ComparedRun]) -> list[str]:
    """Return the comparisons with the first run: one for each run, and one for all runs of a name with several seeds."""
    first = compared[0].over_seeds
    lines = [sentence(run.name, compared[0].name, run.against_first) for run in compared[1:] if not (first and run.over_seeds)]
    for over_seeds in {run.over_seeds.name: run.over_seeds for run in compared if run.over_seeds}.values():
        mean, deviation = share(over_seeds.mean), share(over_seeds.deviation)
        lines.append(f"{over_seeds.name}: {mean} ± {deviation} over clients, with {len(over_seeds.seeds)} seeds")
        if over_seeds.against_first is not None:
            lines.append(over_seeds.against_first.words(over_seeds.name, first.name if first else compared[0].name))
    return lines


def sentence(name: str, first: str, comparison: AgainstFirst | None) -> str:
    """Return the comparison of a run with the first one as a sentence."""
    if comparison is None:
        return f"{name} and {first} have no device in common"
    certain = {"better": "better", "worse": "worse", "unclear": "not certainly different"}[comparison.verdict]
    return (
        f"{name} against {first}: better on {comparison.better} of {comparison.devices} devices, worse on {comparison.worse}, "
        f"{comparison.difference:+.4f} on average: {certain} (sign test, p = {comparison.p:.3g})"
    )


def write(
    compared: Sequence[ComparedRun], runs: Sequence[RunData], out: Path, formats: Sequence[Format] = ("png",)
) -> list[str]:
    """Write compare.png (or other forms) and index.html into `out`; return a line for each.

    Raises:
        SettingError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    sections = [_overview(compared), _drawn(runs), _devices(runs), _reported(compared)]
    return [str(path) for path in figures.write(out, " and ".join(run.name for run in runs), sections, formats)]


def _overview(compared: Sequence[ComparedRun]) -> Section:
    caption = " ".join(f"{line}." for line in sentences(compared))
    return Section("Which run is better?", caption, None, PageTable(*_overview_of(compared)))


def _drawn(runs: Sequence[RunData]) -> Section:
    names = figures.natural(set().union(*(run.accuracies for run in runs)))
    first = runs[0].accuracies
    names.sort(key=lambda name: first.get(name, -1.0))  # stable: devices that are equal stay by name
    figure = figures.new(min(max(12.0, 7 + 0.25 * len(names)), 20.0), 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    values_of = [[run.accuracies.get(name) for name in names] for run in runs]
    sizes = figures.ringed(values_of, 6 if len(names) <= NAMED else 3)
    for number, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        _curve(left, run, colour)
        at = [position for position, name in enumerate(names) if name in run.accuracies]
        values = [run.accuracies[names[position]] for position in at]
        right.plot(at, values, "o", color=colour, markersize=size, alpha=0.85, label=run.name)
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
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(" and ".join(run.name for run in runs))
    caption = (
        "Left: accuracy by round, of the model by which each run's method is judged. Right: the latest accuracy of every "
        "device in every run."
    )
    return Section("Runs side by side", caption, Picture("compare", figure))


def _curve(axes: Any, run: RunData, colour: str) -> None:
    points = run.summary.curves.get(run.summary.judged, [])
    at, values = [point.round for point in points], [point.mean_over_clients for point in points]
    axes.plot(at, values, "-o", color=colour, markersize=3.5 if len(points) <= NAMED else 0, label=run.name)


def _devices(runs: Sequence[RunData]) -> Section:
    table = PageTable(("device", *(run.name for run in runs)), devices_of(runs))
    return Section("Every device", "Its latest accuracy in each run.", None, table)


def _reported(compared: Sequence[ComparedRun]) -> Section:
    rows: list[list[Cell]] = [
        [metric.heading, *(run.metrics.get(name) for run in compared)]
        for name, metric in METRICS.items()
        if any(name in run.metrics for run in compared)
    ]
    caption = "Each metric that devices report, as the mean over devices of what each reported last."
    return Section("Reports of the devices", caption, None, PageTable(("metric", *(run.name for run in compared)), rows))
