"""Excel files and queries of databases are read by the rules for CSV files, and a database's address is told to nobody."""

import os
import sqlite3
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.table import read_table
from tests import engines
from tests.needs import Later, needs

pytestmark = needs("openpyxl", "sqlalchemy")
OPENPYXL = Later("openpyxl")
Write = Callable[[Path, list[list[Any]]], Path]


def excel(path: Path, rows: list[list[Any]]) -> Path:
    book = OPENPYXL.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(path)
    return path


def database(folder: Path, query: str, head: str = "-- url-env: SITE_DB") -> Path:
    with sqlite3.connect(folder / "site-secret.db") as db:
        db.execute("CREATE TABLE IF NOT EXISTS patients (id INTEGER, age REAL, sex TEXT, ill TEXT)")
        db.executemany("INSERT INTO patients VALUES (?, ?, ?, ?)", [(n, n / 2, "fm"[n % 2], "no") for n in range(10)])
    os.environ["SITE_DB"] = f"sqlite:///{folder / 'site-secret.db'}"
    (folder / "site.sql").write_text(f"{head}\n{query}\n")
    return folder / "site.sql"


def test_excel_has_the_rules_of_csv(tmp_path: Path) -> None:
    rows = [
        [None, None, None, None, None],
        ["age", "code", "seen", "whole", "yes"],
        [1.5, "0117", date(2024, 1, 2), 3.0, True],
        [None, "x", datetime(2024, 1, 2, 12, 30), 4, False],
        [None, None, None, None, None],
    ]
    read = read_table(excel(tmp_path / "t.xlsx", rows))
    (tmp_path / "t.csv").write_text("age,code,seen,whole,yes\n1.5,0117,2024-01-02,3,True\n,x,2024-01-02 12:30:00,4,False\n")
    assert read.cells == read_table(tmp_path / "t.csv").cells


def test_excel_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"row 2 of .* has a formula without a value"):
        read_table(excel(tmp_path / "formula.xlsx", [["a"], ["=1+1"]]))
    with pytest.raises(ShardError, match="holds no samples"):
        read_table(excel(tmp_path / "empty.xlsx", [["a", "b"]]))
    with pytest.raises(ShardError, match="seems to be a title"):
        read_table(excel(tmp_path / "title.xlsx", [["Ward 3", None], ["age", "ill"], [3, "no"], [4, "yes"]]))
    (tmp_path / "damaged.xlsx").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ShardError, match="no Excel file that can be read"):
        read_table(tmp_path / "damaged.xlsx")


def test_a_second_sheet_is_named(tmp_path: Path) -> None:
    book = OPENPYXL.Workbook()
    book.active.append(["a"])
    book.active.append([1])
    book.create_sheet("more")
    book.save(tmp_path / "t.xlsx")
    assert "only the first sheet" in read_table(tmp_path / "t.xlsx").notes[-1]


def test_a_query_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = database(tmp_path, "SELECT age, sex, ill FROM patients WHERE id < 3;")
    assert read_table(path).cells == {"age": ["0", "0.5", "1"], "sex": ["f", "m", "f"], "ill": ["no", "no", "no"]}
    (tmp_path / "address").write_text(os.environ.pop("SITE_DB") + "\n")
    path = database(tmp_path, "SELECT age FROM patients LIMIT 2", "-- url-file: address")
    del os.environ["SITE_DB"]
    assert read_table(path).cells == {"age": ["0", "0.5"]}


def test_a_query_cannot_write(tmp_path: Path) -> None:
    for query in ("DELETE FROM patients", "WITH a AS (SELECT 1) DELETE FROM patients"):
        with pytest.raises((SettingError, ShardError), match=r"SELECT or WITH|readonly"):
            read_table(database(tmp_path, query))
    with sqlite3.connect(tmp_path / "site-secret.db") as db:
        assert db.execute("SELECT count(*) FROM patients").fetchone() == (20,)


@pytest.mark.parametrize(
    ("query", "head", "words"),
    [
        ("SELECT age FROM patients", "-- url-env: SITE_DB\n-- rows: 9", "more than 9 rows"),
        ("SELECT unheard FROM patients", "-- url-env: SITE_DB", "no such column: unheard"),
        ("SELECT 1", "", "must say where the address"),
        ("SELECT 1", "-- url-env: NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE holds no address"),
        ("SELECT 1", "-- url-file: gone", "cannot read .*gone"),
        ("SELECT 1", "-- url: sqlite://", "unknown key 'url'"),
        ("SELECT 1", "-- url-env: SITE_DB\n-- rows: many", "rows is a number"),
    ],
)
def test_a_query_that_fails_says_why(tmp_path: Path, query: str, head: str, words: str) -> None:
    with pytest.raises((SettingError, ShardError), match=words):
        read_table(database(tmp_path, query, head))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("postgresql+psycopg://nurse:s3cret@db.nowhere.invalid:5432/wards", "nowhere.invalid"),
        ("postgresql+psycopg://nurse:s3cret@127.0.0.1:1/wards", "refused"),
        ("postgres://nurse:s3cret@db.clinic.example/wards", "Write postgresql://"),
        ("nurse:s3cret@db.clinic.example", "parse"),
        ("s3cret:nurse@db.clinic.example/wards:s3cret@", ""),
        ("nothing://nurse:s3cret@db.clinic.example/wards", "nothing"),
        ("postgresql+psycopg://nurse:s3cret@with@127.0.0.1:1/wards", "%40"),
        ("postgresql+psycopg://s3cret:%733cret@s3cret.invalid/wards", "***.invalid"),
        ("postgresql+psycopg://s3cret.invalid/wards?password=s3cret", "***.invalid"),
        ("mysql+nothing://nurse:s3cret@db.clinic.example/wards", "mysql"),
        ("sqlite:////no/such/folder/patients.db?password=s3cret", "no such file"),
    ],
)
def test_errors_hide_the_password_alone(tmp_path, address: str, says: str, caplog, monkeypatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    path = database(tmp_path, "SELECT age FROM nowhere")
    os.environ["SITE_DB"] = address
    with pytest.raises((SettingError, ShardError)) as raised:
        read_table(path)
    error: BaseException | None = raised.value
    said = str(error) + caplog.text
    assert error is not None and error.__suppress_context__
    assert "s3cret" not in said and "s3cret"[2:] + "@" not in said and says in said


def test_an_error_names_the_table_though_the_database_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("visits") as db:
        db.execute("CREATE TABLE other (age INTEGER)")
    path = database(tmp_path, "SELECT age FROM visits")
    os.environ["SITE_DB"] = "sqlite:///visits"
    with pytest.raises(ShardError, match="no such table: visits"):
        read_table(path)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("query", "cells"),
    [
        ("SELECT age FROM t WHERE ward LIKE 'Int%' ORDER BY age", ["1", "2"]),
        ("SELECT age FROM t WHERE ward = 'North 50%s'", ["13"]),
        ("SELECT age % 10 AS age FROM t WHERE age > 5", ["3"]),
        ("SELECT age::text AS age FROM t WHERE '%(age)s :age ?' <> ward AND age = 2", ["2"]),
        ("WITH a AS (SELECT to_char(DATE '2024-12-31', 'YYYY%%') AS age) SELECT * FROM a", ["2024%%"]),
    ],
)
def test_a_query_reaches_the_database_as_it_is_written(tmp_path: Path, query: str, cells: list[str]) -> None:
    engine = engines.postgres()
    os.environ["SITE_DB"] = engine.new().replace("postgresql://", "postgresql+psycopg://")
    schema = os.environ["SITE_DB"].rpartition("%3D")[2]
    engine.say(f"CREATE TABLE {schema}.t (age int, ward text)")
    engine.say(f"INSERT INTO {schema}.t VALUES (1, 'Intensive'), (2, 'Int 50%'), (13, 'North 50%s')")  # noqa: S608 - a fixed text
    (tmp_path / "site.sql").write_text(f"-- url-env: SITE_DB\n{query}\n")
    assert read_table(tmp_path / "site.sql").cells == {"age": cells}


@pytest.mark.parametrize("options", ["", "?mode=rwc&uri=true", "?timeout=1"])
def test_a_query_creates_no_database(tmp_path: Path, options: str) -> None:
    path = database(tmp_path, "SELECT 1")
    for scheme in ("", "file:"):
        os.environ["SITE_DB"] = f"sqlite:///{scheme}{tmp_path / 'misspelt.db'}{options}"
        with pytest.raises(ShardError, match="no such file of SQLite"):
            read_table(path)
    assert not list(tmp_path.glob("**/*misspelt*"))


@pytest.mark.parametrize("address", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:any?mode=memory&uri=true"])
def test_a_query_may_need_no_database(tmp_path: Path, address: str) -> None:
    path = database(tmp_path, "SELECT 1 AS a")
    os.environ["SITE_DB"] = address
    assert read_table(path).cells == {"a": ["1"]}
