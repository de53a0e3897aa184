"""The papers' tables: `python -m benchmarks.paper TABLE --data NAME=PATH --scratch FOLDER`. An interrupted run continues.

For each seed, column and row of benchmarks/papers/TABLE.toml, trials on validation parts choose the settings (once, for all
seeds); then there is one run at full length. A CSV row is written as each ends, with its command, commit and machine. Its
accuracy by round goes to a file of its own. --column, --row and --seed run a part of the table. `make docs` makes
docs/reference.md from these files, and `python -m benchmarks.paper_curves` makes the pictures.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import click
import numpy as np
import torch

from attune.common.errors import SettingError
from attune.common.hardware import choose
from attune.simulation.grid_search import best
from attune.simulation.manifest import commit_of
from benchmarks.federation import Ended, simulated
from benchmarks.machine import machine
from benchmarks.recipes.run import Right, harmed
from benchmarks.result_file import Results
from benchmarks.rows import COLUMNS as FIGURES
from benchmarks.rows import TRIAL, figures, trial_figures
from benchmarks.study import Study, Task, cut, named, validation
from benchmarks.tables import Column, Row, Table, given, load, names, trials

Executor = Literal["sequential", "stacked"]
OUT = Path(__file__).parent / "results" / "papers"
KEY = ("table", "row", "column", "seed", "settings", "rounds")
MADE = ("command", "commit", "machine")
TRIALS = (*KEY, *TRIAL, *MADE)
CURVES = (*KEY, "closed", "asked", "over_samples", "mean_over_clients")
ROUNDS_A_POINT = 25  # closed rounds of one point of a curve
RIVALS = ("local", "fedavg")  # a client that is worse off than with one of these methods is harmed
CELLS = (*KEY, *(name for name in FIGURES if name not in (*KEY, "task")), "worse_off", *MADE)


@dataclass(frozen=True)
class Cell:
    """Cell of a table: a row, a column and a seed."""

    table: str
    row: Row
    column: Column
    seed: int

    @property
    def command(self) -> str:
        """Command that runs only this cell, without the paths."""
        data = f" --data {self.column.data}=PATH" if self.column.data else ""
        place = f"--column {self.column.name} --row {shlex.quote(self.row.name)} --seed {self.seed}"
        return f"python -m benchmarks.paper {self.table} {place}{data} --scratch FOLDER"

    @property
    def task(self) -> Task:
        """Task of its column, for `study` to cut."""
        column = self.column
        return Task(column.name.replace("/", "-"), column.partition, set=column.set, data=column.data, samples=column.samples)

    def key(self, settings: Iterable[str], rounds: int) -> dict[str, Any]:
        named = {"table": self.table, "row": self.row.name, "column": self.column.name, "seed": self.seed}
        return named | {"settings": " ".join(settings), "rounds": rounds}


def cells(name: str, table: Table, columns: Iterable[str], rows: Iterable[str], seeds: Iterable[int]) -> Iterator[Cell]:
    """Return the cells that were asked for.

    The first seed comes before the second one. In a column, the rivals come before the rows that need their answers. Otherwise
    the order is that of the file.
    """
    columns, rows, seeds = set(columns), set(rows), set(seeds)
    for seed in sorted({seed for column in table.column for seed in column.seeds}):
        for column in table.column:
            for row in sorted(table.row, key=lambda each: each.method not in RIVALS):
                asked = (not columns or column.name in columns) and (not rows or row.name in rows)
                if asked and seed in (seeds or table.seeds(row, column)):
                    yield Cell(name, row, column, seed)


def known(results: Results, key: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the row with this key."""
    wanted = {name: str(value) for name, value in key.items()}
    return next((row for row in results.rows() if wanted.items() <= row.items()), None)


def here(device: str) -> str:
    found, trains = machine(), choose(device)
    beside = f", {torch.cuda.get_device_name(trains)}" if trains.type == "cuda" else ""
    return f"{found['processor']}, {found['cores']} cores{beside}, torch {found['torch']}"


@dataclass(frozen=True)
class Paper:
    """One table, and the places for its figures."""

    table: Table
    files: Mapping[str, Path]
    scratch: Path
    trials: Results
    results: Results
    curves: Results
    executor: Executor
    device: str = "cpu"
    homes: bool = False  # each run keeps its state below the scratch folder until its row is written

    def run(self, cell: Cell) -> None:
        """Run the missing trials of a cell, and then the cell with the settings that they choose."""
        settings = self.chosen(cell)
        key = cell.key(settings, self.table.rounds)
        if known(self.results, key) is not None:
            return
        ended = self.federation(
            cell, cut(self._study, cell.task, cell.seed, self.files, self.scratch), settings, self.table.rounds
        )
        self.curves.add(key | point for point in points(ended))
        right = ended.right()
        found = figures(ended) | {"worse_off": self.worse_off(cell, right)}
        self.results.add([_only(found | key | self.made(cell), CELLS)])
        if cell.row.method in RIVALS:
            arrays: dict[str, Any] = {**right}
            np.savez(self._right(cell, cell.row), **arrays)
            self.fill_rivals(cell)
        click.echo(f"done {key}")

    def fill_rivals(self, cell: Cell) -> None:
        """Fill in, for the rival that was run first, the share of clients that are worse off than with the other rival."""
        for name, right in self._answers(cell).items():
            [row] = [row for row in self.table.row if row.name == name]
            key = {"table": cell.table, "row": name, "column": cell.column.name, "seed": str(cell.seed)}
            self.results.fill(key, {"worse_off": self.worse_off(replace(cell, row=row), right)})

    def worse_off(self, cell: Cell, right: Right) -> float | None:
        """Return the share of clients whose final model is worse than a rival's of this column and seed (exact paired test).

        The result is None if no rival was run below this scratch folder before.
        """
        rivals = {name: each for name, each in self._answers(cell).items() if name != cell.row.name}
        worse = [harmed(mine, {name: each[client] for name, each in rivals.items()}) for client, mine in right.items()]
        return round(fmean(worse), 4) if rivals else None

    def _answers(self, cell: Cell) -> dict[str, Right]:
        """Return the answers, by row, of the rivals of this column and seed that were run below this scratch folder."""
        found: dict[str, Right] = {}
        for row in self.table.row:
            if row.method in RIVALS and (path := self._right(cell, row)).exists():
                with np.load(path) as file:
                    found[row.name] = dict(file)
        return found

    def _right(self, cell: Cell, row: Row) -> Path:
        """Return the file with a rival's answers, for rows of this column and seed that are run after it."""
        folder = self.scratch / "right" / cell.table / f"{cell.task.name}-{cell.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{row.name}.npz"

    def chosen(self, cell: Cell) -> tuple[str, ...]:
        """Return the settings with the best pooled accuracy on validation parts; of equal ones, the first."""
        each, grid = trials(self.table, cell.row), self.table.grid
        if grid is None or len(each) == 1:
            return each[0]
        first = Cell(cell.table, cell.row, cell.column, grid.seed)
        found: dict[tuple[str, ...], float] = {}
        for settings in each:
            key = first.key(settings, grid.rounds)
            row = known(self.trials, key) or self._trial(first, settings, key, grid.share)
            found[settings] = float(row["validation_over_samples"])
        return best(found)

    def _trial(self, cell: Cell, settings: tuple[str, ...], key: dict[str, Any], share: float) -> dict[str, Any]:
        shards = cut(self._study, cell.task, cell.seed, self.files, self.scratch)
        held_out = shards.with_name(f"{shards.name}-validation")
        held_out = held_out if held_out.exists() else validation(shards, share, cell.seed)
        quiet = ("round.evaluate_every=0", "round.evaluate_each_last=0")
        ended = self.federation(cell, held_out, (*settings, *quiet), key["rounds"])
        row = _only(key | trial_figures(ended) | self.made(cell), TRIALS)
        self.trials.add([row])
        click.echo(f"tried {key}: {row['validation_over_samples']}")
        return row

    def federation(self, cell: Cell, shards: Path, settings: Iterable[str], rounds: int) -> Ended:
        everything = given(self.table, cell.column, cell.row, tuple(settings))
        home = self._home(cell, (*settings, shards.name), rounds) if self.homes else None
        return simulated(
            cell.row.method, shards, everything, rounds, cell.seed, cell.row.baseline, self.executor, self.device, home
        )

    def _home(self, cell: Cell, what: Iterable[str], rounds: int) -> Path:
        """Return the folder for the state of a run."""
        name = hashlib.sha256(repr(cell.key(what, rounds)).encode()).hexdigest()[:16]
        return self.scratch / "homes" / name

    def made(self, cell: Cell) -> dict[str, str]:
        command = cell.command if self.device == self.table.device else f"{cell.command} --device {self.device}"
        commit = commit_of(Path(__file__).parents[1]) or "unknown"
        return {"method": cell.row.method, "command": command, "commit": commit, "machine": here(self.device)}

    @property
    def _study(self) -> Study:
        return Study(methods=[], rounds=0, task=[])


def points(ended: Ended) -> Iterator[dict[str, Any]]:
    """Return accuracy by closed rounds, judged as the method is: a point for every ROUNDS_A_POINT rounds, and the end.

    A point is one evaluation of all clients or, if there was none, the mean of the reports of these rounds' cohorts.
    """
    cohorts: list[Mapping[str, Any]] = []
    latest = -ROUNDS_A_POINT
    judged = ended.summary["curves"][ended.summary["judged"]]
    for point in judged:
        due = point["round"] >= latest + ROUNDS_A_POINT or point is judged[-1]
        if not point["whole"]:
            cohorts.append(point)
        if (point["whole"] and due) or len(cohorts) == ROUNDS_A_POINT:
            asked = [point] if point["whole"] else cohorts
            means = {name: round(fmean(each[name] for each in asked), 4) for name in ("over_samples", "mean_over_clients")}
            yield {"closed": point["round"], "asked": "all" if point["whole"] else "cohorts"} | means
            cohorts, latest = [], point["round"]


def _only(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in columns}


def check_known(table: Table, columns: Iterable[str], rows: Iterable[str], seeds: Iterable[int]) -> None:
    """Check that the table has the columns, rows and seeds that were asked for.

    Raises:
        click.UsageError: It has not. The message lists those that it has.
    """
    has: dict[str, list[Any]] = {
        "--column": [column.name for column in table.column],
        "--row": [row.name for row in table.row],
        "--seed": sorted({seed for column in table.column for seed in column.seeds}),
    }
    for (option, known_ones), asked in zip(has.items(), (columns, rows, seeds), strict=True):
        if strange := [one for one in asked if one not in known_ones]:
            listed = ", ".join(map(str, known_ones))
            raise click.UsageError(f"{option} {', '.join(map(str, strange))}: the table has {listed}")


@click.command()
@click.argument("name", metavar="TABLE", type=click.Choice(names()))
@click.option("--data", multiple=True, metavar="NAME=PATH", help="A data set that the table names.")
@click.option(
    "--scratch", type=click.Path(path_type=Path), required=True, help="Folder for shards; no other process may use it."
)
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Folder for the CSV files.")
@click.option("--column", "columns", multiple=True, help="Only these columns.")
@click.option("--row", "rows", multiple=True, help="Only these rows.")
@click.option("--seed", "seeds", multiple=True, type=int, help="Only these seeds.")
@click.option("--executor", type=click.Choice(["sequential", "stacked"]), help="As in attune.simulate (default: the table's).")
@click.option("--device", help="cpu, cuda, cuda:N or mps (default: the table's).")
@click.option("--homes", is_flag=True, help="Keep each run's state below the scratch folder: an interrupted run continues.")
def main(
    name: str, data: tuple[str, ...], scratch: Path, out: Path, columns: tuple[str, ...], rows: tuple[str, ...],
    seeds: tuple[int, ...], executor: Executor | None, device: str | None, homes: bool,
) -> None:  # fmt: skip
    """Run TABLE, or what is left of it."""
    table = load(name)
    check_known(table, columns, rows, seeds)
    device = device or table.device
    try:
        choose(device)
    except SettingError as error:
        raise click.ClickException(f"this machine has no accelerator, so no cell was run: {error}") from None
    files = named(data)
    scratch.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    paper = Paper(
        table, files, scratch, Results(out / f"{name}_grid.csv", TRIALS), Results(out / f"{name}.csv", CELLS),
        Results(out / f"{name}_curves.csv", CURVES), executor or table.executor, device, homes,
    )  # fmt: skip
    for cell in cells(name, table, columns, rows, seeds):
        if cell.column.data and cell.column.data not in files:
            click.echo(f"left out, because it needs --data {cell.column.data}=PATH: {cell.command}", err=True)
            continue
        paper.run(cell)


if __name__ == "__main__":
    main()
