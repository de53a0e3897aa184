"""Generated tables through every reader: describe, one training step and a prediction, with equal results in all forms."""

import csv
import os
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import AttuneError
from attune.common.plan import Plan
from attune.fedclient.data.describe import describe
from attune.fedclient.data.new_samples import new_samples
from attune.fedclient.data.prepare import Prepared, prepare, prepare_features
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.planning import make_plan, resolve
from tests.needs import Later, needs

pytestmark = needs("openpyxl", "pyarrow", "sqlalchemy")
OPENPYXL, ARROW, PARQUET = Later("openpyxl"), Later("pyarrow"), Later("pyarrow.parquet")
TABLES = 100  # of each reader
SETTINGS = resolve({"method": {"name": "fedavg"}})
Columns = dict[str, list[Any]]

WORDS = st.text(st.characters(categories=("L", "Nd", "P", "S", "Zs"), max_codepoint=0x2FF), max_size=6)
CELLS: list[st.SearchStrategy[Any]] = [
    st.floats(-1e9, 1e9, allow_nan=False, width=32),
    st.integers(-(1 << 40), 1 << 40),
    st.integers(0, 3),
    st.booleans(),
    st.dates(date(1900, 3, 1), date(2100, 1, 1)),  # Excel's calendar is wrong before
    st.sampled_from(["f", "m", "Other", "?", "n/a", " x "]),
    st.sampled_from(["ja", "nein", "NEIN"]),
    st.sampled_from(
        ["31.12.2024", "1/2/2024", "13/2/2024", "2024-02-30", "0117", "1,5", "1e5", "inf", "<5", "#DIV/0!", "TRUE"]
    ),
    WORDS,
]


@st.composite
def tables(draw: st.DrawFn) -> Columns:
    """Draw up to four columns of up to 40 rows, with gaps, and a label."""
    rows = draw(st.sampled_from([4, 12, 40]))
    names = draw(
        st.lists(st.sampled_from(["a", "b_cm", "case id", "Größe (m)", "a=b", "y2"]), min_size=1, max_size=4, unique=True)
    )
    columns: Columns = {}
    for name in names:
        cells = draw(st.sampled_from(CELLS))
        cells = draw(st.sampled_from([cells, st.none() | cells]))
        few = draw(st.lists(cells, min_size=1, max_size=rows))
        columns[name] = [few[row % len(few)] for row in range(rows)]
    return columns | {"y": [("no", "yes")[row % 2] for row in range(rows)]}


def write_csv(path: Path, columns: Columns) -> Path:
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return path.with_suffix(".csv")


def write_parquet(path: Path, columns: Columns) -> Path:
    PARQUET.write_table(ARROW.table(columns), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def write_excel(path: Path, columns: Columns) -> Path:
    book = OPENPYXL.Workbook()
    for at, row in enumerate([list(columns), *zip(*columns.values(), strict=True)], 1):
        for place, value in enumerate(row, 1):
            cell = book.active.cell(at, place, value)
            if isinstance(value, str):
                cell.data_type = "s"  # also where it looks like a formula
    book.save(path.with_suffix(".xlsx"))
    return path.with_suffix(".xlsx")


def write_sql(path: Path, columns: Columns) -> Path:
    with sqlite3.connect(path.with_suffix(".db")) as db:
        named = ", ".join(f'"{name}"' for name in columns)
        db.execute(f"CREATE TABLE t ({named})")
        rows = [
            [str(cell) if isinstance(cell, (bool, date)) else cell for cell in row]
            for row in zip(*columns.values(), strict=True)
        ]
        db.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(columns))})", rows)  # noqa: S608
    os.environ["GENERATED_DB"] = f"sqlite:///{path.with_suffix('.db')}"
    path.with_suffix(".sql").write_text("-- url-env: GENERATED_DB\nSELECT * FROM t\n")
    return path.with_suffix(".sql")


WRITERS: dict[str, Callable[[Path, Columns], Path]] = {
    "csv": write_csv, "parquet": write_parquet, "excel": write_excel, "sql": write_sql,
}  # fmt: skip


def trained(path: Path, options: ReadOptions) -> tuple[Prepared, Plan, torch.Tensor]:
    """Read a table by its schema, and train one step of logistic regression."""
    shard = load_shard(path, options=options)
    plan = make_plan(SETTINGS, {"site": shard.profile()}, "f")
    prepared = prepare(shard, plan)
    weight_FC = torch.zeros(plan.model.shape[0], len(plan.classes), requires_grad=True)
    torch.nn.functional.cross_entropy(prepared.train_x @ weight_FC, prepared.train_y).backward()
    assert weight_FC.grad is not None
    return prepared, plan, -weight_FC.grad


def predicted(path: Path, plan: Plan, prepared: Prepared, weight_FC: torch.Tensor) -> torch.Tensor:
    samples = new_samples([str(path)], plan.model, plan.column_names, (), plan.schema)
    return (prepare_features(samples.x, plan.model, prepared.standardiser) @ weight_FC).argmax(dim=1)


def changed(columns: Columns) -> Columns:
    """Return a later export: a column less, one more, a gap in each column, and values that were never seen."""
    lacking = sorted(columns)[0] if len(columns) > 2 else "y"
    words = {name: all(isinstance(cell, str | None) for cell in cells) for name, cells in columns.items()}
    return {"row": list(range(len(columns["y"])))} | {
        name: [None, *(["unheard"] if words[name] else cells[1:2]), *cells[2:]]
        for name, cells in columns.items()
        if name not in ("y", lacking)
    }


def schema_or_none(path: Path) -> Any:
    """Return the proposed schema; None if the table has no column for features, which is said in one line."""
    try:
        return describe(read_table(path), ReadOptions.of("y")).schema
    except AttuneError as error:
        assert "leaves no column" in str(error) or "column name" in str(error)
        return None


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=TABLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(columns=tables())
def test_every_table_goes_through(form: str, columns: Columns) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[form](Path(folder) / "site", columns)
        if (schema := schema_or_none(path)) is None:
            return
        try:
            prepared, plan, weight_FC = trained(path, ReadOptions.of("y", schema=schema))
        except AttuneError as error:
            assert any(words in str(error) for words in ("infinite or too large", "do not fit", "no label")), error
            return
        later = changed(columns)
        if not set(later) & set(schema.used):
            return
        try:
            labels = predicted(WRITERS[form](Path(folder) / "new", later), plan, prepared, weight_FC)
        except AttuneError as error:
            assert "does not fit its schema" in str(error), error  # a word where numbers or dates were
            return
        assert len(labels) == len(next(iter(later.values())))


@settings(max_examples=TABLES // 2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(columns=tables())
def test_the_form_of_the_file_does_not_matter(columns: Columns) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write(Path(folder) / "site", columns) for write in WRITERS.values()]
        if (schema := schema_or_none(paths[0])) is None:
            return
        results = [outcome(path, ReadOptions.of("y", schema=schema)) for path in paths]
        for form, result in zip(list(WRITERS)[1:], results[1:], strict=True):
            assert type(result) is type(results[0]), (form, result, results[0])
            if not isinstance(result, str):
                assert all(np.array_equal(a, b) for a, b in zip(result, results[0], strict=True)), form


def outcome(path: Path, options: ReadOptions) -> Sequence[Any] | str:
    """Return what a model is trained with, and its weights; or why it is not."""
    try:
        prepared, _, weight_FC = trained(path, options)
    except AttuneError as error:
        return str(error)
    return [prepared.train_x.numpy(), prepared.train_y.numpy(), prepared.test_x.numpy(), weight_FC.numpy()]
