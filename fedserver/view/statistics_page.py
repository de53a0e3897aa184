"""Statistics of a fleet's data for people: lines of text, and a page with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from attune.common.pictures import figures
from attune.common.plan import FEWEST_ROWS
from attune.common.text import aligned, clean
from attune.fedserver.surveys.fleet_statistics import ColumnErrors, ColumnStatistics, FleetStatistics, Noise
from attune.fedserver.surveys.kaplan_meier import KaplanMeier

HEADS = ("column", "devices", "rows", "missing", "mean", "deviation", "5 %", "median", "95 %", "between sites")
SURVIVAL_HEADS = ("until", "at risk", "events", "survival")
WITHHELD = "withheld"
MOST_PICTURES = 40  # columns with a picture


def lines_of(report: FleetStatistics) -> Iterator[str]:
    """Yield the statistics as lines of text."""
    samples = WITHHELD if report.samples is None else f"{report.samples:,}"
    yield f"{report.devices} devices answered; samples: {samples}"
    for name, why in sorted(report.without.items()):
        yield clean(f"without {name}: {why}", 400)
    for name, why in report.withheld.items():
        yield clean(f"{WITHHELD}: {name}: {why}", 400)
    if report.noise is not None:
        yield f"noisy: {_noise(report.noise)}"
    if report.columns:
        yield ""
        yield from aligned([HEADS, *(tuple(map(_cell, _row(name, column))) for name, column in report.columns.items())])
    for heads, counts in _tables(report):
        yield ""
        yield from aligned([heads, *(tuple(map(_cell, row)) for row in counts)])
    if report.survival is not None:
        yield ""
        yield from aligned([SURVIVAL_HEADS, *(tuple(map(_cell, row)) for row in _survival_rows(report.survival))])
    if report.class_distance is not None:
        yield f"distance of the sites' class shares from the fleet's: {report.class_distance:.2f} (0: alike, 1: disjoint)"
    if report.why:
        yield ""
        yield _advice(report)


def write_page(out: Path, report: FleetStatistics) -> list[Path]:
    """Write a page with a table and a picture of each column into a folder, and return the paths."""
    return figures.write(out, "Statistics of the fleet's data", _sections(report))


def _sections(report: FleetStatistics) -> Iterator[figures.Section]:
    rows = [_row(name, column) for name, column in report.columns.items()]
    said = [f"{report.devices} devices answered", _advice(report).removesuffix(".")]
    if report.noise is not None:
        said += [f"Noisy: {_noise(report.noise)}", *(f"{WITHHELD}: {name}: {why}" for name, why in report.withheld.items())]
    yield figures.Section("Columns", ". ".join(said) + ".", table=figures.PageTable(HEADS, rows) if rows else None)
    if report.classes:
        yield _class_section(report)
    for heads, counts in _tables(report):
        if heads[0] != "class":
            yield figures.Section(f"Values of {heads[0]}", "Rows of each value.", table=figures.PageTable(heads, counts))
    if report.survival is not None:
        yield _survival_section(report.survival)
    drawn = [(name, column) for name, column in report.columns.items() if column.histogram and column.histogram.edges]
    for number, (name, column) in enumerate(drawn[:MOST_PICTURES]):
        yield figures.Section(
            clean(name, 60), _histogram_caption(column), figures.Picture(f"column-{number + 1}", _histogram(column))
        )


def _survival_rows(survival: KaplanMeier) -> list[tuple[figures.Cell, ...]]:
    return list(zip(survival.times, survival.at_risk, survival.events, survival.survival, strict=True))


def _survival_section(survival: KaplanMeier) -> figures.Section:
    figure = figures.new(7.0, 3.0)
    axes = figure.subplots()
    axes.step([0.0, *survival.times], [1.0, *survival.survival], where="post")
    axes.set_ylim(0.0, 1.02)
    axes.set_ylabel("share without event")
    axes.set_xlabel("time")
    figures.plain(axes)
    caption = (
        "Kaplan and Meier's estimate at the end of each interval. At risk: rows at its beginning. In each interval at least "
        f"{FEWEST_ROWS} rows have the event, and what is behind the last one is withheld."
    )
    rows = _survival_rows(survival)
    return figures.Section("Survival", caption, figures.Picture("survival", figure), figures.PageTable(SURVIVAL_HEADS, rows))


def _advice(report: FleetStatistics) -> str:
    """Return which methods to try first and why, or why there is nothing to show."""
    return f"Try first: {', '.join(report.first)} ({report.why})." if report.first else f"{report.why}."


def _noise(noise: Noise) -> str:
    """Return what the noise protects, and what the errors mean."""
    whose = "each sample" if noise.unit == "example" else "each group of samples, which counts as one"
    return f"epsilon = {noise.epsilon:g}, delta = {noise.delta:g} for {whose}; ± is one standard error of the noise"


def _row(name: str, column: ColumnStatistics) -> tuple[figures.Cell, ...]:
    quantiles, errors = column.quantiles or {}, column.errors or ColumnErrors(0.0, 0.0)
    shares = ("0.05", "0.5", "0.95")
    numbers = [column.rows, column.missing, column.mean, column.deviation, *(quantiles.get(share) for share in shares)]
    noise = [errors.rows, errors.missing, errors.mean, errors.deviation, *((errors.quantiles or {}).get(s) for s in shares)]
    return (clean(name, 60), column.devices, *map(_with_error, numbers, noise), column.between)


def _with_error(number: float | None, error: float | None) -> figures.Cell:
    """Return a figure with its error; without noise, or withheld, as it is."""
    return f"{number:.4g} ± {error:.2g}" if number is not None and error else number


def _tables(report: FleetStatistics) -> Iterator[tuple[tuple[str, str], list[tuple[figures.Cell, ...]]]]:
    """Yield heads and rows of the counts of classes, and of each category's values."""
    counts = [("class", "samples", report.classes)] if report.classes else []
    counts += [(clean(name, 60), "rows", column.values) for name, column in report.columns.items() if column.values]
    error = report.noise.error if report.noise is not None else None
    for name, what, shown in counts:
        yield (name, what), [(clean(label, 60), _with_error(count, error)) for label, count in shown.items()]


def _cell(cell: figures.Cell) -> str:
    if cell is None:
        return WITHHELD
    return f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)


def _class_section(report: FleetStatistics) -> figures.Section:
    shown = {label: count for label, count in (report.classes or {}).items() if count is not None}
    figure = figures.new(7.0, 3.0)
    axes = figure.subplots()
    axes.bar(range(len(shown)), list(shown.values()), color=figures.COLOURS[0])
    axes.set_xticks(range(len(shown)), [clean(label, 20) for label in shown], rotation=90 if len(shown) > 8 else 0)
    axes.set_ylabel("samples")
    figures.plain(axes)
    caption = f"Classes with fewer than {FEWEST_ROWS} samples, or on too few devices, are withheld."
    heads, rows = next(_tables(report))
    return figures.Section("Classes", caption, figures.Picture("classes", figure), figures.PageTable(heads, rows))


def _histogram_caption(column: ColumnStatistics) -> str:
    share = f"{column.between:.0%}" if column.between is not None else "an unknown share"
    return (
        f"{column.rows} rows of {column.devices} devices; {share} of the variance lies between sites. The outer bins are open."
    )


def _histogram(column: ColumnStatistics) -> Any:
    """Draw the histogram. An open outer bin is drawn as wide as its neighbour."""
    assert column.histogram is not None  # noqa: S101 (the caller has looked)
    edges, counts = column.histogram.edges, column.histogram.counts
    step = (edges[-1] - edges[0]) / max(1, len(edges) - 1) or abs(edges[0]) or 1.0
    ends = [edges[0] - step, *edges, edges[-1] + step]
    figure = figures.new(7.0, 2.6)
    axes = figure.subplots()
    widths = [high - low for low, high in pairwise(ends)]
    axes.stairs([count / width for count, width in zip(counts, widths, strict=True)], ends, fill=True)
    axes.set_ylabel("rows a unit")
    figures.plain(axes)
    return figure
