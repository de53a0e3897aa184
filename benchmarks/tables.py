"""The papers' tables as files in benchmarks/papers: columns are tasks, rows are methods."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import msgspec

from attune.common.config import Count, CountOrZero, convert, read_toml
from attune.common.methods.registry import get
from attune.simulation.grid_search import TrialSettings
from benchmarks.grid import Grid, alternatives

FOLDER = Path(__file__).parent / "papers"
PRINTED = FOLDER / "printed.csv"


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shards as `fedclient partition` makes them, once for each seed."""

    name: str
    partition: list[str]
    set: list[str] = []
    seeds: tuple[int, ...] = (0,)
    data: str = ""  # name of the file in --data; empty: the scheme makes its own data
    samples: CountOrZero = 0  # number of the file's samples to draw for training, and for testing; 0: all


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method, with its own alternatives for the grid."""

    name: str  # as the paper prints it
    method: str
    set: list[str] = []
    own: list[list[str]] = msgspec.field(default_factory=lambda: [[]])
    common: str = ""  # the printed row of this method's common model
    seeds: tuple[int, ...] | None = None  # only these of the column's seeds; None: all of them
    baseline: bool = False  # devices also train a model alone, from which the dial may take values


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials on validation parts of the training samples: every choice of `train` with every own choice of a row."""

    rounds: Count
    train: list[list[str]]
    seed: int = 0
    share: float = 0.25


class Leads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leads of one row over others, as a figure of the paper prints them."""

    row: str  # the row that is ahead
    figure: str  # figure of the paper
    printed: str  # the figure's name in papers/printed.csv


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File in benchmarks/papers. Without a grid, every row has one setting, and nothing is chosen."""

    paper: str
    rounds: Count
    column: list[Column]
    row: list[Row]
    set: list[str] = []
    grid: Choice | None = None
    figure: str = "bmta_over_samples"  # the printed figure, by its name in benchmarks/rows.py
    common_figure: str = "common_over_samples"
    over_clients: str = "bmta"  # the same figure as a mean over clients
    last: str = ""  # the figure of the last round, to be shown beside that of the best one
    against: str = ""  # in a reduced table, the row that the others are compared with in place of a printed cell
    leads: Leads | None = None
    executor: Literal["sequential", "stacked"] = "stacked"
    device: str = "cpu"

    def seeds(self, row: Row, column: Column) -> list[int]:
        """Return the seeds with which a row is run in a column."""
        return [seed for seed in column.seeds if row.seeds is None or seed in row.seeds]


def load(name: str) -> Table:
    """Read a table.

    Raises:
        SettingError: The table does not exist, or has unknown fields.
    """
    return convert(Table, read_toml(FOLDER / f"{name}.toml"), "")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def printed(table: str) -> dict[tuple[str, str], float]:
    """Return the printed cells, in per cent, by row and column."""
    with PRINTED.open(newline="", encoding="utf-8") as file:
        return {(row["row"], row["column"]): float(row["printed"]) for row in csv.DictReader(file) if row["table"] == table}


def trials(table: Table, row: Row) -> list[TrialSettings]:
    """Return the settings of each trial of a row; there is one if nothing is to be chosen.

    Raises:
        SettingError: As in `alternatives`.
    """
    if table.grid is None:
        return [(*row.set, *own) for own in row.own]
    grid = Grid(rounds=table.grid.rounds, seed=table.grid.seed, train=table.grid.train, own={row.name: row.own})
    return [(*row.set, *each) for each in alternatives(grid, row.name)]


def given(table: Table, column: Column, row: Row, settings: TrialSettings) -> TrialSettings:
    """Return all settings of a run. As in the papers, updates are not bounded, and rounds are not taken back.

    Models are scored if a table says so. A method that fine-tunes is scored only when all clients evaluate, not in orders of
    training too: no figure uses these scores if a part of the clients trains, and each costs a fine-tuning.
    """
    method = get(row.method)
    bounds = (f"method.{name}={value:g}" for name, value in method.unbounded.items())
    quiet = ("train.evaluate=false",) if method.predictor == "fine-tune" else ()
    return ("round.take_back=0", "round.evaluate_each_last=0", *bounds, *quiet, *table.set, *column.set, *settings)
