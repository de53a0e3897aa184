"""A paper's table as a file in benchmarks/papers: its columns are tasks, its rows methods."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import msgspec

from attune.common.config import Count, CountOrZero, convert, read_toml
from attune.common.methods.registry import get
from benchmarks.grid import Grid, Settings, alternatives

FOLDER = Path(__file__).parent / "papers"
PRINTED = FOLDER / "printed.csv"


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shards as `fedclient partition` makes them, once for each seed."""

    name: str
    partition: list[str]
    set: list[str] = []
    seeds: tuple[int, ...] = (0,)
    data: str = ""  # what --data calls the file; none: the scheme makes its own
    samples: CountOrZero = 0  # of the file, so many drawn for training and as many for testing; 0: all


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method, with the alternatives of its own that the grid tries."""

    name: str  # as the paper prints it
    method: str
    set: list[str] = []
    own: list[list[str]] = msgspec.field(default_factory=lambda: [[]])
    common: str = ""  # the printed row of this method's common model
    seeds: tuple[int, ...] | None = None  # only these of a column's; none: all of them
    baseline: bool = False  # devices also train a model alone, which the dial may take values of


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials on validation parts of the training samples: every choice of `train` by every one of a row's own."""

    rounds: Count
    train: list[list[str]]
    seed: int = 0
    share: float = 0.25


class Leads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By how many points one row is ahead of others, as a figure of the paper prints it."""

    row: str  # the one that is ahead
    figure: str  # of the paper
    printed: str  # the figure's name in papers/printed.csv


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in benchmarks/papers. Without a grid every row has one setting, and nothing is chosen."""

    paper: str
    rounds: Count
    column: list[Column]
    row: list[Row]
    set: list[str] = []
    grid: Choice | None = None
    figure: str = "bmta_over_samples"  # of benchmarks/rows.py: what the paper prints
    common_figure: str = "common_over_samples"
    over_clients: str = "bmta"  # the same figure as a mean over clients
    against: str = ""  # of a reduced table: the row that the others are above or below, instead of near a printed cell
    leads: Leads | None = None
    executor: Literal["sequential", "stacked", "auto"] = "stacked"
    device: str = "cpu"

    def seeds(self, row: Row, column: Column) -> list[int]:
        """The seeds with which a row is run in a column."""
        return [seed for seed in column.seeds if row.seeds is None or seed in row.seeds]


def load(name: str) -> Table:
    """Errors: SettingError for a table that is not there, or that has unknown fields."""
    return convert(Table, read_toml(FOLDER / f"{name}.toml"), "")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def printed(table: str) -> dict[tuple[str, str], float]:
    """(row, column) -> the printed cell, in per cent."""
    with PRINTED.open(newline="", encoding="utf-8") as file:
        return {(row["row"], row["column"]): float(row["printed"]) for row in csv.DictReader(file) if row["table"] == table}


def trials(table: Table, row: Row) -> list[Settings]:
    """The settings of each trial of a row; one, if nothing is to be chosen. Errors: SettingError as of `alternatives`."""
    if table.grid is None:
        return [(*row.set, *own) for own in row.own]
    grid = Grid(rounds=table.grid.rounds, seed=table.grid.seed, train=table.grid.train, own={row.name: row.own})
    return [(*row.set, *each) for each in alternatives(grid, row.name)]


def given(table: Table, column: Column, row: Row, settings: Settings) -> Settings:
    """All settings of a run. No paper bounds what a device hands in, or takes a round back.

    Models are scored when a table says so. A method that fine-tunes is scored when all evaluate, and not in orders of training
    too: no figure takes these scores where a part of the clients trains, and each costs a fine-tuning.
    """
    method = get(row.method)
    bounds = (f"method.{name}={value:g}" for name, value in method.unbounded.items())
    quiet = ("train.evaluate=false",) if method.predictor == "fine-tune" else ()
    return ("round.take_back=0", "round.evaluate_each_last=0", *bounds, *quiet, *table.set, *column.set, *settings)
