"""The tables of docs/reference.md, choosing.md and security.md, written from the CSV files in benchmarks/results.

`python -m benchmarks.report` rewrites what lies between two marks of the page; `--check` says whether that is up to date.
A cell: the printed figure, ours by the same kind of mean, the difference, and whether the printed one holds; of a reduced
table, whether ours is on the printed side of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click

from benchmarks import recipe_tables, robust_tables
from benchmarks.paper import CELLS, OUT, Cell, cells
from benchmarks.study import Results
from benchmarks.tables import Column, Table, load, names, printed

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- benchmarks.report begins -->", "<!-- benchmarks.report ends -->"
NEAR = 1.0  # points: as far from a printed cell as ours may be


@dataclass(frozen=True)
class Line:
    """A row of the paper in one column: the printed cell, and our runs of it, one a seed, in per cent."""

    row: str
    printed: float | None
    ours: tuple[float, ...]
    over_clients: tuple[float, ...]
    seeds: int  # that the table asks for
    settings: str

    @property
    def verdict(self) -> str:
        """holds: within NEAR of the printed cell. With several seeds not decided: their mean is not, but one of them is."""
        if self.printed is None or not self.ours:
            return ""
        near = [abs(each - self.printed) <= NEAR for each in (fmean(self.ours), *self.ours)]
        return self._counted("holds" if near[0] else "not decided" if any(near) else "does not")

    def direction(self, reference: Line) -> str:
        """holds: on the printed side of the reference, by more than NEAR. Not decided: by less."""
        if self.printed is None or reference.printed is None or not (self.ours and reference.ours) or self == reference:
            return ""
        claimed, found = reference.printed - self.printed, fmean(reference.ours) - fmean(self.ours)
        return self._counted("not decided" if abs(found) <= NEAR else "holds" if claimed * found > 0 else "does not")

    def _counted(self, said: str) -> str:
        return said if len(self.ours) >= self.seeds else f"{said} ({len(self.ours)} of {self.seeds} seeds)"


def lines_of(table: Table, name: str, column: Column, rows: Sequence[Mapping[str, str]]) -> list[Line]:
    """What was run of a column, in the order of the table, a method's common model below it."""
    paper = printed(name)
    found = []
    for row in table.row:
        runs = [each for each in rows if (each["row"], each["column"]) == (row.name, column.name)]
        shown = [
            (row.name, table.figure, table.over_clients),
            *([(row.common, table.common_figure, "common")] if row.common else []),
        ]
        for printed_name, figure, over_clients in shown:
            found.append(
                Line(
                    printed_name,
                    paper.get((printed_name, column.name)),
                    tuple(100 * float(run[figure]) for run in runs),
                    tuple(100 * float(run[over_clients]) for run in runs if run[over_clients]),
                    len(table.seeds(row, column)),
                    settings_of(row.method, row.name, runs),
                )
            )
    return found


def settings_of(method: str, name: str, runs: Sequence[Mapping[str, str]]) -> str:
    said = " ".join(each for each in (runs[0]["settings"] if runs else "").split() if not each.startswith("round."))
    return f"`{method}`" + (f" `{said}`" if said else "")


def constant(rows: Iterable[Mapping[str, str]], column: Column) -> Line | None:
    """What a constant answer reaches."""
    runs = {each["seed"]: each for each in rows if each["column"] == column.name}.values()
    if not runs:
        return None
    pooled = tuple(100 * float(run["constant_over_samples"]) for run in runs)
    return Line("a constant answer", None, pooled, tuple(100 * float(run["constant"]) for run in runs), len(column.seeds), "")


def section(name: str, results: Path = OUT) -> Iterator[str]:
    """The lines of a table's part of the page."""
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
        yield f"| row | printed | ours, pooled | difference | {held} | over clients | method and what was chosen |"
        yield "|---|---|---|---|---|---|---|"
        for line in [*([extra] if extra else []), *lines]:
            said = line.verdict if not table.against else line.direction(reference) if reference else ""
            yield shown(line, said)
        yield ""
    done = {(row["row"], row["column"], row["seed"]) for row in rows}
    asked = list(cells(name, table, (), (), ()))
    left = [cell for cell in asked if (cell.row.name, cell.column.name, str(cell.seed)) not in done]
    yield from missing(name, left, len(asked))


def shown(line: Line, said: str) -> str:
    """A row of markdown."""
    mean = fmean(line.ours)
    spread = f" ({min(line.ours):.1f} to {max(line.ours):.1f}, {len(line.ours)} seeds)" if len(line.ours) > 1 else ""
    clients = f"{fmean(line.over_clients):.1f}" if line.over_clients else ""
    cell, away = (f"{line.printed:.2f}", f"{mean - line.printed:+.1f}") if line.printed is not None else ("", "")
    return f"| {line.row} | {cell} | {mean:.1f}{spread} | {away} | {said} | {clients} | {line.settings} |"


def missing(name: str, left: Sequence[Cell], of: int) -> Iterator[str]:
    """What was not run, with the command that runs it."""
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


def papers(results: Path = OUT) -> str:
    """The tables of both papers."""
    return "\n\n".join("\n".join(section(name, results)) for name in names())


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference.md": papers,
    DOCS / "choosing.md": lambda: "\n".join(recipe_tables.sections()),
    DOCS / "security.md": lambda: "\n".join(robust_tables.sections()),
}


def page(path: Path) -> str:
    """The page with its tables as the CSV files have them. Errors: ValueError if a mark is missing."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path.name} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{PAGES[path]()}\n\n{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit status 1 if a page is not up to date.")
def main(check: bool) -> None:
    """Writes the tables into the pages."""
    for path in PAGES:
        made = page(path)
        if made == path.read_text(encoding="utf-8"):
            click.echo(f"{path.name}: up to date")
        elif check:
            raise SystemExit(f"{path.name} is not what the CSV files say: python -m benchmarks.report")
        else:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
