"""The papers' tables of docs/reference.md, from the CSV files in benchmarks/results; `make docs` writes them into the page.

A cell has the printed figure, ours by the same kind of mean, the difference, and whether the printed one holds. In a reduced
table it has whether ours is on the printed side of one row. Where a figure prints the lead of a row, there are these leads too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.lines import Line, constant, leads, lines_of
from benchmarks.paper import CELLS, OUT, Cell, cells
from benchmarks.result_file import Results
from benchmarks.tables import Column, Table, load, names


def section(name: str, results: Path = OUT) -> Iterator[str]:
    """Return the lines of a table's part of the page."""
    table, rows = load(name), Results(results / f"{name}.csv", CELLS).rows()
    yield f"### {table.paper}: `{name}`"
    yield ""
    for column in table.column:
        lines = [line for line in lines_of(table, name, column, rows) if line.ours]
        if not lines:
            continue
        extra = constant(rows, column)
        yield f"**{column.name}**, {table.rounds} rounds"
        yield ""
        held = f"against {table.against}" if table.against else "printed cell"
        reference = next((line for line in lines if line.row == table.against), None)
        yield f"| row | printed | ours, pooled | difference | {held} | over clients | harmed | method and what was chosen |"
        yield "|---|---|---|---|---|---|---|---|"
        for line in [*([extra] if extra else []), *lines]:
            said = line.verdict if not table.against else line.direction(reference) if reference else ""
            yield shown(line, said)
        yield ""
        yield from ahead(table, column, rows)
    done = {(row["row"], row["column"], row["seed"]) for row in rows}
    asked = list(cells(name, table, (), (), ()))
    left = [cell for cell in asked if (cell.row.name, cell.column.name, str(cell.seed)) not in done]
    yield from missing(name, left, len(asked))


def ahead(table: Table, column: Column, rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Return the leads of one row over others, if a figure of the paper prints them."""
    found = leads(table, column, rows)
    if table.leads and found:
        yield f"{table.leads.row} is ahead ({table.leads.figure}):"
        yield ""
        yield "| of | printed, points | ours, pooled | difference | printed lead |"
        yield "|---|---|---|---|---|"
        for line in found:
            yield f"| {line.row} | {' | '.join(beside(line))} | {line.verdict} |"
        yield ""


def beside(line: Line) -> tuple[str, str, str]:
    """Return the printed figure, ours, and the difference."""
    last = f" (last round {fmean(line.last):.1f})" if line.last else ""
    spread = f" ({min(line.ours):.1f} to {max(line.ours):.1f}, {len(line.ours)} seeds)" if len(line.ours) > 1 else ""
    cell, away = (f"{line.printed:.2f}", f"{line.mean - line.printed:+.1f}") if line.printed is not None else ("", "")
    return cell, f"{line.mean:.1f}{'*' if line.no_better else ''}{spread}{last}", away


def shown(line: Line, said: str) -> str:
    """Return a row of Markdown."""
    clients = f"{fmean(line.over_clients):.1f}" if line.over_clients else ""
    worse = f"{fmean(line.worse_off):.0f} %" if line.worse_off else ""
    return f"| {line.row} | {' | '.join(beside(line))} | {said} | {clients} | {worse} | {line.settings} |"


def missing(name: str, left: Sequence[Cell], of: int) -> Iterator[str]:
    """Return the cells that were not run, with the command that runs them."""
    if not left:
        yield f"All {of} runs of this table were made."
        return
    command = f"python -m benchmarks.paper {name} --scratch FOLDER{data_of(left)}"
    yield f"Not run: {len(left)} of {of}. `{command}` goes on with them:"
    yield ""
    by_place: dict[tuple[str, int], list[str]] = {}
    for cell in left:
        by_place.setdefault((cell.column.name, cell.seed), []).append(cell.row.name)
    places: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for (column, seed), rows in by_place.items():
        places.setdefault((seed, tuple(rows)), []).append(column)
    whole = len(load(name).row)
    for (seed, missing_rows), columns in places.items():
        said = f"all {whole} rows" if len(missing_rows) == whole else "; ".join(missing_rows)
        yield f"- {', '.join(columns)} (`{' '.join(f'--column {each}' for each in columns)} --seed {seed}`): {said}"


def data_of(left: Iterable[Cell]) -> str:
    found = dict.fromkeys(cell.column.data for cell in left if cell.column.data)
    return "".join(f" --data {each}=PATH" for each in found)


def papers(results: Path = OUT) -> Iterator[str]:
    """Yield the lines of all tables of both papers."""
    for name in names():
        yield from section(name, results)
        yield ""
