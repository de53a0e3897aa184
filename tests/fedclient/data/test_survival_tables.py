"""Times and events of tables: kinds of the schema, options, and what is refused by the column's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.config import TrainSettings
from attune.common.errors import SettingError, ShardError
from attune.common.plan import ModelSpec, Plan
from attune.common.schema import Column, Schema, schema_of_json
from attune.fedclient.data.describe import describe
from attune.fedclient.data.labels import target_numbers
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.table_schemas import merge_proposals

ASKED = ReadOptions.of("months,died", task="survival")
SCHEMA = Schema.of({"age": Column("number"), "months": Column("time", unit="months"), "died": Column("event")})


def table(folder: Path, name: str = "kiel.csv", **cells: object) -> Path:
    """Write 24 patients; `cells` takes the place of what sample 3 has in a column."""
    rows = [{"age": 40 + n % 5, "months": 2.5 * n, "died": n % 2} | (cells if n == 2 else {}) for n in range(24)]
    path = folder / name
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    return path


def test_a_table_is_read_alike_by_options_and_by_a_schema(tmp_path: Path):
    plain = load_shard(table(tmp_path), options=ASKED)
    assert (plain.task, plain.labels, plain.column_names) == ("survival", ["months", "died"], ("age",))
    assert "2 columns" in plain.described and plain.profile().targets is None
    by_schema = load_shard(table(tmp_path), options=ReadOptions.of(schema=SCHEMA))
    assert by_schema.profile().task == "survival" and by_schema.labels == plain.labels and by_schema.schema == SCHEMA
    assert np.array_equal(by_schema.train_y, plain.train_y) and by_schema.train_y.shape[1] == 2
    spec = ModelSpec("any", "tabular", (1,), 1)
    ready = prepare(plain, Plan("f", 0, spec, ["months", "died"], "fedavg", {}, TrainSettings(validation=0.0), task="survival"))
    seen = np.concatenate([ready.train_y.numpy(), ready.test_y.numpy()])
    assert sorted(map(tuple, seen.tolist())) == sorted((2.5 * n, n % 2) for n in range(24)), "times are not scaled"


def test_describe_proposes_the_kinds_and_the_sites_agree(tmp_path: Path):
    proposed = describe(read_table(table(tmp_path)), ASKED)
    kinds = {name: column.kind for name, column in proposed.schema.columns.items()}
    assert kinds == {"age": "number", "months": "time", "died": "event"} and proposed.schema.feature_names == ["age"]
    assert "no column is the label: say --label NAME" not in proposed.warnings
    merged = merge_proposals({"kiel": proposed.schema, "lund": proposed.schema})
    assert merged == proposed.schema and schema_of_json(merged.to_json(), "it").time_and_event == ["months", "died"]
    lazy = LazyShard.on_disk(table(tmp_path), ReadOptions.of("months,died", task="survival", schema="auto"))
    assert lazy.profile.task == "survival" and lazy.profile.proposal == merged
    assert lazy.load_in is not None and lazy.load_in(SCHEMA).labels == ["months", "died"]
    with pytest.raises(SettingError, match="the schema has no columns of the kinds time and event"):
        lazy.load_in(Schema.of({"age": Column("number"), "months": Column("number"), "died": Column("label")}))
    for kind, other in (("time", "died"), ("event", "months")):
        lacking = Schema({name: column for name, column in SCHEMA.columns.items() if name == other or name == "age"})
        text = f"lund: no column .*, the {kind}: add it, or leave this site out"
        with pytest.raises(SettingError, match=text):
            merge_proposals({"kiel": SCHEMA, "lund": lacking})


def test_a_schema_without_survival_has_the_bytes_of_before():
    """Compare with bytes and digest that the commit before survival wrote."""
    schema = Schema.of({"age": Column("number", unit="years"), "ill": Column("label"), "sex": Column("category", values=["f"])})
    text = (
        b'{"columns":{"age":{"kind":"number","unit":"years"},"ill":{"kind":"label"},"sex":{"kind":"category","values":["f"]}}'
    )
    assert schema.to_json() == text + b',"format":1}'
    assert schema.digest == "sha256:356ecc9e5a46032056b2590569d2f545839de810269e8fbae39f1bcb530630cf"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": Column("time")}, "has the time 'a' and no column of the kind event: survival needs both"),
        ({"b": Column("event")}, "has the event 'b' and no column of the kind time"),
        ({"a": Column("time"), "b": Column("time"), "c": Column("event")}, "several columns of the kind time: a, b"),
        ({"a": Column("time"), "b": Column("event"), "c": Column("event")}, "several columns of the kind event: b, c"),
        ({"a": Column("time"), "b": Column("event"), "ill": Column("label")}, "a time and an event, and the label 'ill'"),
    ],
)
def test_a_schema_has_one_time_and_one_event_or_none(columns: dict[str, Column], words: str):
    with pytest.raises(SettingError, match=words):
        Schema.of({"age": Column("number"), **columns})


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"months": -1}, "1 values of the column 'months' cannot be a time, .* the first is -1 in sample 3"),
        ({"months": "inf"}, "column 'months' cannot be a time, which is finite and at least 0; the first is inf in sample 3"),
        ({"died": 2}, "column 'died' cannot be an event, which is 0 .* or 1 .*; the first is 2 in sample 3"),
        ({"died": 0.5}, "column 'died' cannot be an event"),
        ({"died": ""}, "have nothing in the column 'months', 'died', which is to be predicted"),
        ({"months": "long"}, r"column 'months' \('long' in sample 3\)"),
    ],
)
@pytest.mark.parametrize("options", [ASKED, ReadOptions.of(schema=SCHEMA)], ids=["options", "schema"])
def test_what_is_no_time_or_event_is_refused_by_its_column(tmp_path: Path, cells: dict[str, object], words: str, options):
    with pytest.raises(ShardError, match=words):
        load_shard(table(tmp_path, **cells), options=options)


def test_missing_columns_and_options_that_contradict_are_refused_by_name(tmp_path: Path):
    path = table(tmp_path)
    lacking = Schema.of({"age": Column("number"), "weeks": Column("time"), "died": Column("event")})
    with pytest.raises(SettingError, match=r"kiel\.csv has no column 'weeks'"):
        load_shard(path, options=ReadOptions.of(schema=lacking))
    with pytest.raises(SettingError, match="--task survival needs two columns, first that of the time"):
        load_shard(path, options=ReadOptions.of("months", task="survival"))
    for wrong in (ReadOptions.of("died", schema=SCHEMA), ReadOptions.of("months,died", task="regression", schema=SCHEMA)):
        with pytest.raises(SettingError, match=r"is about survival \(time 'months', event 'died'\): leave --label"):
            load_shard(path, options=wrong)
    assert load_shard(path, options=ReadOptions.of("months, died", schema=SCHEMA)).task == "survival"


def test_arrays_have_a_time_and_an_event(write):
    x, y = np.random.default_rng(0).normal(size=(24, 3)), np.c_[np.arange(24), np.arange(24) % 2]
    assert load_shard(write(x, y, meta={"task": "survival"})).labels == ["time", "event"]
    with pytest.raises(ShardError, match="has 3 columns; survival needs two: the time, then the event"):
        load_shard(write(x, np.c_[y, y[:, 1]], meta={"task": "survival"}))
    with pytest.raises(ShardError, match="needs a time of at least 0 and an event of 0 or 1, shape"):
        load_shard(write(x, y[:, 0], meta={"task": "survival"}))


@given(st.lists(st.tuples(st.floats(0, 1e99), st.sampled_from([0.0, 1.0])), min_size=1, max_size=5))
def test_any_time_and_event_stay_what_they_are(rows: list[tuple[float, float]]):
    y = np.array(rows)
    assert np.array_equal(target_numbers(y, len(y), "y", "survival"), y)
    for wrong, name in ((np.nan, "time"), (-1e-9, "time"), (np.inf, "time"), (0.5, "event"), (np.nan, "event")):
        broken = y.copy()
        broken[-1, ("time", "event").index(name)] = wrong
        with pytest.raises(ShardError, match=f"1 values of the column {name!r} .* in sample {len(y)}"):
            target_numbers(broken, len(y), "y", "survival")
