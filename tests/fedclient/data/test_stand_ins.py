"""Values that stand for nothing are said: in features and outcomes, of tables and arrays, and no others are."""

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attune.fedclient.data.describe import describe
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions

FOR_NOTHING = "may stand for nothing"
R = np.random.default_rng(5)


def table(folder: Path, cell: Callable[[int], Any], rows: int = 120) -> Path:
    path = folder / "t.csv"
    path.write_text("a,v,ill\n" + "".join(f"{cell(n)},{n % 7}.5,{n % 2}\n" for n in range(rows)))
    return path


def said(path: Path, schema: str = "auto") -> str:
    options = ReadOptions.of("ill", schema=schema)
    return " ".join([*describe(read_table(path), options).warnings, *load_shard(path, options=options).warnings])


@pytest.mark.parametrize("mark", ["9999-12-31", "1753-01-01", "1900-01-01", "0001-01-01", "2999-12-31", "1970-01-01"])
@pytest.mark.parametrize("first", [date(2020, 1, 1), date(1945, 1, 1)])
def test_a_date_that_stands_for_none(tmp_path: Path, mark: str, first: date) -> None:
    if mark == "1970-01-01":
        first = date(1985, 1, 1)
    path = table(tmp_path, lambda n: mark if n % 9 == 0 else first + timedelta(days=97 * n))
    assert f"{mark} in a" in said(path) and f"usual,{mark}" in said(path)
    taken = ReadOptions.of("ill", schema="auto", missing_words=f"usual,{mark}")
    assert FOR_NOTHING not in " ".join(load_shard(path, options=taken).warnings)


def test_a_usual_date_among_dates_of_birth(tmp_path: Path) -> None:
    born = date(1935, 3, 1)
    path = table(tmp_path, lambda n: "1970-01-01" if n % 9 == 0 else born + timedelta(days=190 * n))
    assert "1970-01-01 in a" in said(path)
    path = table(tmp_path, lambda n: born + timedelta(days=(date(1970, 1, 1) - born).days % 191 + 191 * (n - 60)))
    assert FOR_NOTHING not in said(path)


@pytest.mark.parametrize(
    ("mark", "others"),
    [
        (999, lambda n: 40 + n % 30),
        (999, lambda n: 45.5 + n % 80),  # weights up to 125
        (-1, lambda n: n % 20),
        (-9, lambda n: n / 7),
        (99, lambda n: n % 9),
        (9, lambda n: n % 2),
        (9999, lambda n: 100 + 3 * n),
        (2147483647, lambda n: n % 50),
        (0, lambda n: 60 + n % 50),  # blood pressure
    ],
)
@pytest.mark.parametrize("schema", ["", "auto"])
def test_a_number_that_stands_for_nothing(tmp_path: Path, mark: int, others: Callable[[int], Any], schema: str) -> None:
    path = table(tmp_path, lambda n: mark if n % 9 == 0 else others(n))
    assert f"{mark} in a" in said(path, schema)


@pytest.mark.parametrize(
    "value",
    [
        lambda n: n % 7,
        lambda n: n % 2,
        lambda n: 20 + n % 80,  # ages up to 99
        lambda n: (n * n) % 1000,
        lambda n: 999 - n,
        lambda n: -999 + 15 * n,
        lambda n: round(float(np.exp(R.normal(3, 1.5))), 2),  # incomes
        lambda n: (0, 25, 50, 100)[n % 4],  # doses
        lambda n: 0 if n % 3 else n,
        lambda n: round(float(R.normal(0, 1)), 3),
        lambda n: date(1930, 1, 1) + timedelta(days=200 * n),
        lambda n: date(2024, 1, 1) + timedelta(days=n % 5),
    ],
)
def test_ordinary_values_are_quiet(tmp_path: Path, value: Callable[[int], Any]) -> None:
    assert FOR_NOTHING not in said(table(tmp_path, value))


def test_arrays_and_outcomes_are_looked_at_too() -> None:
    x, age = R.normal(size=(90, 3)), np.where(np.arange(90) % 9 == 0, 999.0, 40 + np.arange(90) % 30)
    arrays = shard_of("a", (np.column_stack([x, age]), np.arange(90) % 2)).warnings
    assert any("999 in column 3" in text for text in arrays)
    for task, y in (("regression", age), ("survival", np.column_stack([age, np.arange(90) % 2]))):
        assert any("999 in" in text for text in shard_of("a", (x, y), ReadOptions.of(task=task)).warnings), task


@pytest.mark.parametrize(
    ("task", "y", "named"),
    [
        ("classes", np.ones(90, int), "one class, 1"),
        ("regression", np.full(90, 3.5), "0 (3.5)"),
        ("multilabel", np.column_stack([np.arange(90) % 2, np.zeros(90)]), "1 (0)"),
        ("survival", np.column_stack([1 + np.arange(90), np.zeros(90)]), "1 (0)"),
    ],
)
def test_an_outcome_that_never_changes_is_said(task: str, y: Any, named: str) -> None:
    said_ = shard_of("a", (R.normal(size=(90, 3)), y), ReadOptions.of(task=task)).warnings
    assert any(named in text and ("never changes" in text or "one class" in text) for text in said_)


@pytest.mark.parametrize("mark", ["1904-01-01", "1858-11-17", "2038-01-19", "31.12.99", "01.01.00", "1980-01-06"])
def test_any_repeated_date_far_from_all_others(tmp_path: Path, mark: str) -> None:
    first = date(2023, 12, 1)
    path = table(tmp_path, lambda n: mark if n % 9 == 0 else first + timedelta(days=2 * n + n % 3))
    assert f"{mark} in a" in said(path)
    path = table(tmp_path, lambda n: first + timedelta(days=(2 if n < 90 else 20) * n))
    assert FOR_NOTHING not in said(path)


@pytest.mark.parametrize("schema", ["", "auto"])
def test_a_number_that_stands_for_nothing_is_above_no_threshold(tmp_path: Path, schema: str) -> None:
    """Expect a warning: `a>50` would make a class of 999, which stands for an unknown time."""
    path = table(tmp_path, lambda n: 999 if n % 9 == 0 else 40 + n % 30)
    options = ReadOptions.of("a>50", schema=schema)
    assert "999 in a" in " ".join(load_shard(path, options=options).warnings)
    assert "999 in a" in " ".join(describe(read_table(path), options).warnings)
    plain = table(tmp_path, lambda n: 40 + n % 30)
    assert FOR_NOTHING not in " ".join(load_shard(plain, options=options).warnings)
