"""Pictures of accuracy by round: `python -m benchmarks.paper_curves TABLE [--row NAME ...]`, one for each column that was run.

They are drawn from TABLE_curves.csv, which `benchmarks.paper` writes: over all test samples, a line for each row, its mean over
seeds; with several seeds, a band from the lowest to the highest. Between evaluations of all clients the values are the cohorts'
reports. --sigma draws FedMCSA's Figure 5 instead: accuracy by sigma, a line for each column.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

import click

from attune.common.pictures import figures
from benchmarks.paper import CELLS, CURVES, OUT
from benchmarks.result_file import Results
from benchmarks.tables import names

SIGMA = re.compile(r"method\.mu=0 method\.sigma=(?P<sigma>\d+)")
Course = dict[int, list[float]]  # accuracy in per cent, one value for each seed, by closed rounds


def courses(points: Iterable[Mapping[str, str]], column: str) -> dict[str, Course]:
    """Return the rows of a column in the order in which they were run."""
    found: dict[str, Course] = {}
    for point in points:
        if point["column"] == column:
            course = found.setdefault(point["row"], defaultdict(list))
            course[int(point["closed"])].append(100 * float(point["over_samples"]))
    return found


def picture(title: str, rows: Mapping[str, Course], axis: str = "closed rounds") -> bytes:
    figure = figures.new(7.5, 4.5)
    axes = figure.subplots()
    for colour, (name, course) in zip(figures.COLOURS, rows.items(), strict=False):
        closed, seeds = sorted(course), max(len(values) for values in course.values())
        marker = "o" if len(closed) == 1 else None  # a line of one point is invisible
        axes.plot(closed, [fmean(course[each]) for each in closed], color=colour, label=name, marker=marker)
        if seeds > 1:
            low, high = ([end(course[each]) for each in closed] for end in (min, max))
            axes.fill_between(closed, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_title(title)
    axes.set_xlabel(axis)
    if axis == "sigma":
        axes.set_xscale("log")
    axes.set_ylabel("accuracy over all test samples, in %")
    axes.legend(frameon=False)
    figures.plain(axes)
    return figures.file_of(figure)


def by_sigma(rows: Iterable[Mapping[str, str]]) -> dict[str, Course]:
    """Return the accuracies of FedMCSA by sigma, in the best round as printed, for each column with several of them."""
    found: dict[str, Course] = {}
    for row in rows:
        match = SIGMA.fullmatch(row["settings"])
        if row["method"] == "fedmcsa" and match is not None:
            course = found.setdefault(row["column"], defaultdict(list))
            course[int(match["sigma"])].append(100 * float(row["bmta_over_samples"]))
    return {column: course for column, course in found.items() if len(course) > 1}


@click.command()
@click.argument("name", metavar="TABLE", type=click.Choice(names()))
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Folder of the CSV file, and for the pictures.")
@click.option("--row", "chosen", multiple=True, help=f"Only these rows; at most {len(figures.COLOURS)}.")
@click.option("--sigma", is_flag=True, help="Draw accuracy by sigma of FedMCSA.")
def main(name: str, out: Path, chosen: tuple[str, ...], sigma: bool) -> None:
    """Draw the rows of TABLE that were run."""
    if sigma:
        path, columns = out / f"{name}_sigma.png", by_sigma(Results(out / f"{name}.csv", CELLS).rows())
        path.write_bytes(picture("FedMCSA by sigma", columns, "sigma"))
        click.echo(f"{path}: {', '.join(columns)}")
        return
    points = Results(out / f"{name}_curves.csv", CURVES).rows()
    for column in dict.fromkeys(point["column"] for point in points):
        rows = courses(points, column)
        asked = {row: rows[row] for row in chosen or rows if row in rows}
        if len(asked) > len(figures.COLOURS):
            raise click.UsageError(f"{len(asked)} rows of {column} are more than there are colours: name some with --row")
        path = out / f"{name}_{column.replace('/', '-')}.png"
        path.write_bytes(picture(column, asked))
        click.echo(f"{path}: {', '.join(asked)}")


if __name__ == "__main__":
    main()
