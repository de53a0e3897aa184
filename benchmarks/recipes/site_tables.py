"""Published tables with natural sites, cut by site: School, and heart disease with its codes as categories.

N rows, F columns. This module does not import torch.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from attune.common.durable import PUBLIC, write_file
from attune.common.errors import ShardError
from attune.common.schema import Column, Schema
from attune.fedclient.data.arrays import Array, read_arrays, write_arrays
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.source import read_source
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Positions
from attune.simulation.partition.schemes.cut import stratified
from attune.simulation.partition.schemes.natural import folders

LABEL, SPLIT = "y", "split"
HELD_OUT = 4  # one row of so many is tested
CODES = {
    "sex": ("0", "1"),
    "cp": ("1", "2", "3", "4"),
    "fbs": ("0", "1"),
    "restecg": ("0", "1", "2"),
    "exang": ("0", "1"),
    "slope": ("1", "2", "3"),
    "thal": ("3", "6", "7"),
}  # columns of heart disease that hold codes


@dataclass(frozen=True)
class SiteTables:
    """Table of many sites.

    Attributes:
        x: Numbers, (N, F); missing values are NaN.
        y: Labels or numbers to predict, (N,).
        site: Site of each row, (N,), as a place in `names`.
        names: Names of the sites.
        columns: Names of the F columns.
        meta: Content of meta.json of each shard.
        schema: Kinds of the columns; None: all are numbers.
    """

    x: Array
    y: Array
    site: Array
    names: tuple[str, ...]
    columns: tuple[str, ...]
    meta: Meta
    schema: Schema | None = None


@dataclass(frozen=True)
class SiteCut:
    """Training and test rows of each site, in the order of `tables.names`."""

    tables: SiteTables
    train: tuple[Positions, ...]
    test: tuple[Positions, ...]

    def write(self, out: Path) -> list[Path]:
        """Write a shard for each site below `out`, and return their folders in order."""
        made = []
        for name, train, test in zip(folders(self.tables.names), self.train, self.test, strict=True):
            folder = out / name
            folder.mkdir(parents=True)
            meta, parts = self._arrays(folder, train, test)
            write_file(folder / "meta.json", msgspec.json.encode(meta) + b"\n", PUBLIC, durable=False)
            for part in ("test", "train"):
                write_arrays(folder / f"{part}.npz", dict(zip("xy", parts[part], strict=True)))
            made.append(folder)
        return made

    def _arrays(self, folder: Path, train: Positions, test: Positions) -> tuple[Meta, dict[str, tuple[Array, Array]]]:
        """Return meta.json and the arrays of a site. With a schema they come from a table, as at a real site."""
        tables = self.tables
        if tables.schema is None:
            return tables.meta, {part: (tables.x[rows], tables.y[rows]) for part, rows in (("train", train), ("test", test))}
        path = folder / "table.csv"
        rows = np.concatenate([train, test])
        split = np.repeat(["train", "test"], [len(train), len(test)])
        write_table(path, tables.columns, tables.x, tables.y, rows, split)
        scale = "federation" if tables.meta.standardise == "federation" else ""
        options = ReadOptions.of(LABEL, split=SPLIT, task=tables.meta.task, schema=tables.schema, standardise=scale)
        source = read_source(path, options)
        path.unlink()
        if source.test is None:
            raise ShardError(f"{path} has no test part")
        return source.meta, {"train": source.train, "test": source.test}


def write_table(path: Path, columns: Sequence[str], x: Array, y: Array, rows: Positions, split: Array | None = None) -> None:
    """Write rows as a CSV file, with empty cells for missing values.

    Args:
        path: The file.
        columns: Names of the features.
        x: Features of all rows, (N, F); NaN is a missing value.
        y: Labels of all rows, (N,).
        rows: Places of the rows that are written, (n,).
        split: Part of each of them, "train" or "test", (n,); None: no such column.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, LABEL, *([] if split is None else [SPLIT])])
        for at, row in enumerate(rows.tolist()):
            cells = ["" if np.isnan(value) else f"{value:g}" for value in x[row]]
            writer.writerow([*cells, y[row], *([] if split is None else [split[at]])])


def by_site(tables: SiteTables, seed: int, at_most: int | None = None) -> SiteCut:
    """Hold out a random quarter of each site's rows, and keep at most `at_most` of the others.

    A smaller number keeps a part of what a larger one keeps.
    """
    train, test = [], []
    for site in range(len(tables.names)):
        rng = np.random.default_rng([seed, site])
        rows = rng.permutation(np.flatnonzero(tables.site == site))
        if tables.meta.task == "classes":
            held = stratified(tables.y[rows], 1 / HELD_OUT, rng)
        else:
            held = np.arange(len(rows)) < len(rows) // HELD_OUT
        train.append(rows[~held][:at_most])
        test.append(rows[held])
    return SiteCut(tables, tuple(train), tuple(test))


def read_school(path: Path) -> SiteTables:
    """Read School (28 features of pupils of 139 schools, and their exam scores): the arrays x, y and school.

    Raises:
        ShardError: The file cannot be read, or lacks an array.
    """
    x, y, school = read_arrays(path, ("x", "y", "school"))
    values, site = np.unique(school, return_inverse=True)
    names = tuple(f"school{value}" for value in values.tolist())
    columns = tuple(f"f{at}" for at in range(x.shape[1]))
    return SiteTables(x, y, site.reshape(-1), names, columns, Meta(task="regression", standardise="federation"))


def read_heart(path: Path) -> SiteTables:
    """Read heart disease of four hospitals: the arrays x, num, hospital, columns and hospital_names. Codes become categories.

    Raises:
        ShardError: The file cannot be read, or lacks an array.
    """
    x, num, hospital, columns, names = read_arrays(path, ("x", "num", "hospital", "columns", "hospital_names"))
    kinds = {
        name: Column("category", values=list(CODES[name]), missing="indicator")
        if name in CODES
        else Column("number", missing="indicator")
        for name in columns.tolist()
    }
    roles = {LABEL: Column("label", values=["well", "ill"]), SPLIT: Column("split")}
    y = np.where(num > 0, "ill", "well")
    return SiteTables(x, y, hospital, tuple(names.tolist()), tuple(columns.tolist()), Meta(), Schema.of({**kinds, **roles}))
