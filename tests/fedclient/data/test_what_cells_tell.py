"""Everything that a cell is recognised by becomes part of its value: forms of dates, clocks and zones, limits of detection."""

from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attune.common.errors import ShardError
from attune.common.schema import Column, DateForm, Schema
from attune.fedclient.data.describe import Proposal, describe
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.stand_ins import days_of
from attune.fedclient.data.table import DataTable
from attune.fedclient.data.table_encoder import TableEncoder
from attune.fedclient.read_options import ReadOptions

ORIGIN = date(2000, 1, 1)
LAST = float((date(2024, 12, 31) - ORIGIN).days)


def proposed(cells: list[Any]) -> Proposal:
    count = len(cells)
    columns = {"seen": cells, "v": [0.5 * (n % 7) for n in range(count)], "y": [n % 2 for n in range(count)]}
    return describe(DataTable(Path("t.csv"), columns), ReadOptions.of("y"))


def encoded(cells: list[Any], column: Column) -> list[float]:
    x = TableEncoder(Schema.of({"seen": column})).encode(DataTable(Path("t.csv"), {"seen": cells})).x
    return [float(value) for value in x[:, 0]]


@pytest.mark.parametrize(
    ("cell", "form", "days"),
    [
        ("20241231", "year-month-day", LAST),
        (20241231, "year-month-day", LAST),
        (20241231.0, "year-month-day", LAST),
        (np.int64(20241231), "year-month-day", LAST),
        ("20241231120000", "year-month-day", LAST + 0.5),
        ("20241231T1800", "year-month-day", LAST + 0.75),
        ("31.12.24", "year-month-day", LAST),
        ("31.12.99", "year-month-day", -1),
        ("31.12.24 6:00", "year-month-day", LAST + 0.25),
        ("31 Dec 2024", "year-month-day", LAST),
        ("31-DEC-24", "year-month-day", LAST),
        ("31. Dezember 2024", "year-month-day", LAST),
        ("31 décembre 2024", "year-month-day", LAST),
        ("December 31, 2024", "year-month-day", LAST),
        ("31DEC2024", "year-month-day", LAST),
        ("31dec24", "year-month-day", LAST),
        ("31DEC2024:18:00:00", "year-month-day", LAST + 0.75),
        ("2024.12.31", "year-month-day", LAST),
        ("2024-12-31 12:00:00 UTC", "year-month-day", LAST + 0.5),
        ("31.12.2024 06:00 GMT", "year-month-day", LAST + 0.25),
        ("Dec 31st 2024 18:00", "year-month-day", LAST + 0.75),
        ("2024-Dec-31", "year-month-day", LAST),
        ("31-12-2024", "day/month/year", LAST),
        ("12-31-2024", "month/day/year", LAST),
        ("12/31/24", "month/day/year", LAST),
        ("12/31/2024 6:00 PM", "month/day/year", LAST + 0.75),
        ("12/31/2024 12:30 am", "month/day/year", LAST + 0.5 / 24),
        ("2024-12-31T23:00:00-07:00", "year-month-day", LAST + 1.25),
        ("2024-12-31T12:00Z", "year-month-day", LAST + 0.5),
        ("31.12.2024 01:00 +0200", "year-month-day", LAST - 1 / 24),
        (datetime(2024, 12, 31, 23, tzinfo=timezone(timedelta(hours=-7))), "year-month-day", LAST + 1.25),
    ],
)
def test_a_date_has_the_day_that_is_written(cell: Any, form: DateForm, days: float) -> None:
    assert days_of(cell, ORIGIN, form) == pytest.approx(days, abs=1e-9)


@pytest.mark.parametrize(
    "cell",
    [
        "20241301",
        "2024123",
        31,
        True,
        "31.13.24",
        "31 Foo 2024",
        "13:00",
        "31/12/2024",
        "31-12-2024",
        "12/31/2024 13:00 PM",
        "Mai 2024",
        1e300,
        float("inf"),
    ],
)
def test_what_is_no_date_is_refused(cell: Any) -> None:
    with pytest.raises(ValueError, match=r"it is no|must be in|out of range"):
        days_of(cell, ORIGIN, "year-month-day" if "PM" not in str(cell) else "month/day/year")


DAYS = [date(2023, 12, 1) + timedelta(days=2 * n + n % 3) for n in range(60)]


@pytest.mark.parametrize(
    "form", ["%d.%m.%y", "%d %b %Y", "%Y%m%d", "%d-%b-%y", "%B %d, %Y", "%d/%m/%y", "%m-%d-%Y", "%Y%m%d%H%M%S"]
)
def test_columns_of_dates_are_proposed_as_dates(form: str) -> None:
    cells = [day.strftime(form) for day in DAYS]
    found = proposed(cells)
    column = found.schema.columns["seen"]
    assert column.kind == "date"
    assert encoded(cells, column) == [float((day - ORIGIN).days) for day in DAYS]
    assert ("30 to 99 are 1930 to 1999" in " ".join(found.warnings)) == ("%y" in form)


def test_numbers_with_eight_digits_that_are_no_dates_stay_numbers() -> None:
    assert proposed([20240000 + 7 * n % 1000 for n in range(60)]).schema.columns["seen"].kind == "number"
    assert proposed([10000101 + n % 7 for n in range(60)]).schema.columns["seen"].kind == "number"


def test_dates_among_other_cells_are_said() -> None:
    found = proposed([*(day.strftime("%d.%m.%y") for day in DAYS), *["came twice, see above"] * 5])
    assert "seen mixes kinds: 60 of 65 cells are dates, others are came twice" in " ".join(found.warnings)
    found = proposed([*(int(day.strftime("%Y%m%d")) for day in DAYS), *[0] * 5])
    assert "seen mixes kinds: 60 of 65 cells are dates such as 20231201, others are 0" in " ".join(found.warnings)


def test_a_table_without_schema_says_which_numbers_are_dates(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("seen,ill\n" + "".join(f"{day:%Y%m%d},{at % 2}\n" for at, day in enumerate(DAYS)))
    assert "numbers of seen look like dates" in " ".join(LazyShard.on_disk(path, ReadOptions.of("ill")).warnings)


@pytest.mark.parametrize("cell", ["<0.1", "< 0.1", "<=0.1", "≤0.1", ">0.1", "≥ 0.1", ">=0.1"])
def test_a_value_beyond_a_limit_counts_as_the_limit(cell: str) -> None:
    cells = [cell if n % 5 == 0 else f"{n % 7 + 0.5}" for n in range(60)]
    found = proposed(cells)
    assert found.schema.columns["seen"] == Column("number")
    assert f"seen holds 12 values beyond a limit, such as {cell}" in " ".join(found.warnings)
    assert encoded(cells, Column("number"))[:2] == pytest.approx([0.1, 1.5])


def test_groups_of_numbers_stay_categories() -> None:
    column = proposed([("<18", "18-65", ">65")[n % 3] for n in range(60)]).schema.columns["seen"]
    assert column.kind == "category" and "<18" in column.values
    assert proposed([("<18", ">65")[n % 2] for n in range(60)]).schema.columns["seen"].kind == "category"
    with pytest.raises(ShardError, match="holds no number"):
        encoded(["<low"], Column("number"))


def test_dates_in_two_orders_are_said_as_such() -> None:
    days = [ORIGIN + timedelta(days=5 * n) for n in range(120)]
    said = proposed([day.strftime("%d/%m/%Y" if day.day % 2 else "%m/%d/%Y") for day in days])
    assert any("only be day/month/year, and others only month/day/year" in text for text in said.warnings)
    assert not any("others are ." in text for text in said.warnings)


@pytest.mark.parametrize("cell", ["{} kg", "{}%", "{}/80", "{}±2", "1 {:03d}", "Thu, 07 Dec 20{:02d}", "20{:02d}-W49"])
def test_numbers_in_no_form_that_is_read_are_not_called_free_text(cell: str) -> None:
    said = proposed([cell.format(10 + n % 60) + " " * (n % 2) for n in range(120)])
    assert any("holds text such as" in text and "docs/tables.md" in text for text in said.warnings), said.warnings
    said = proposed([f"seen {'abcdefghij'[n % 10]} and {'klmnopq'[n % 7]}" for n in range(120)])
    assert any("holds free text" in text for text in said.warnings)
