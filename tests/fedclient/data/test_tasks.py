"""Shards of tasks other than classes, times and events among them: how they are read, checked, described and prepared."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attune.common.config import TrainSettings
from attune.common.errors import SettingError, ShapeMismatch, ShardError
from attune.common.plan import ModelSpec, Plan, Scale
from attune.common.schema import Column, Schema, schema_of_json
from attune.fedclient.data.describe import describe
from attune.fedclient.data.labels import target_numbers
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.table_schemas import merge_proposals
from attune.simulation.partition.datasets import load_dataset

X = np.random.default_rng(1).normal(size=(24, 3))
DOSE = np.linspace(10, 56, 24)
BOTH = np.stack([DOSE, -DOSE], axis=1)
LABELS = (np.arange(72).reshape(24, 3) % 2).astype(np.int64)
REGRESSION, MULTILABEL = {"task": "regression"}, {"task": "multilabel"}


def plan_of(task: str, classes: list[int | str], targets: Scale | None = None) -> Plan:
    spec = ModelSpec("any", "tabular", (3,), len(classes))
    return Plan("f", 0, spec, classes, "fedavg", {}, TrainSettings(), task=task, targets=targets)


def test_a_profile_says_the_task_and_the_sums_of_its_targets(write):
    profile = load_shard(write(X, BOTH, test=(X[:4], BOTH[:4]), meta=REGRESSION | {"classes": ["up", "down"]})).profile()
    assert (profile.task, profile.labels, profile.samples, profile.test_samples) == ("regression", ["up", "down"], 24, 4)
    assert profile.targets is not None and profile.targets.rows == 24
    assert profile.targets.mean == pytest.approx([33, -33])
    assert profile.targets.squares == pytest.approx([((DOSE - 33) ** 2).sum()] * 2)
    labels = load_shard(write(X, LABELS, meta=MULTILABEL, name="labels"))
    assert (labels.profile().task, labels.profile().labels, labels.profile().targets) == ("multilabel", [0, 1, 2], None)
    assert (
        "3 labels" in labels.described
        and not labels.per_position
        and labels.warnings == ("18 training samples are fewer than a batch of 32: every epoch is a single step",)
    )
    assert load_shard(write(X, LABELS[:, 0], name="plain")).profile().task == "classes"


def test_targets_are_standardised_over_the_federation_and_their_values_come_back(write):
    shard = load_shard(write(X, DOSE, test=(X[:4], DOSE[:4]), meta=REGRESSION))
    ready = prepare(shard, plan_of("regression", [0], Scale([30.0], [2.0])))
    assert ready.test_y.flatten().tolist() == pytest.approx([-10, -9, -8, -7])
    assert ready.train_y.dtype.is_floating_point and ready.train_y.shape[1:] == (1,)
    assert sorted([*ready.train_y.flatten().tolist(), *ready.validation_y.flatten().tolist()]) == pytest.approx(
        ((DOSE - 30) / 2).tolist(), rel=1e-6
    )


def test_groups_stay_together_although_no_two_targets_are_alike(write):
    path = write(X, DOSE, meta=REGRESSION | {"groups": "who"})
    np.savez(path / "train.npz", x=X, y=DOSE, who=np.arange(24) // 3)
    shard = load_shard(path)
    kept, tested = ({round((y - 10) / 2) // 3 for y in part[:, 0]} for part in (shard.train_y, shard.test_y))
    assert len(shard.test_y) >= 6 and not kept & tested


@pytest.mark.parametrize(
    ("y", "meta", "message"),
    [
        (
            np.where(DOSE > 50, np.nan, DOSE),
            REGRESSION,
            r"holds 3 values that the task regression cannot use, the first is nan",
        ),
        (np.array(["low"] * 24), REGRESSION, r"the task regression needs numbers, shape \(N,\) or \(N, K\)"),
        (DOSE[:7], REGRESSION, "holds 7 rows for 24 samples"),
        (BOTH[:, :, None], REGRESSION, r"shape \(24, 2, 1\)"),
        (LABELS[:, 0], MULTILABEL, r"needs 0 or 1, shape \(N, K\)"),
        (LABELS * 2, MULTILABEL, "holds 36 values .* the first is 2.0 in sample 1; each must be 0 or 1"),
        (BOTH[:, :0], REGRESSION, "has 0 columns"),
        (BOTH, REGRESSION | {"classes": ["dose"]}, "`classes` of .* names 1 columns of y, but y has 2"),
        (DOSE, {"task": "regresion"}, "Invalid enum value 'regresion'"),
        (DOSE + 0.5, None, r'"task": "regression" in meta.json, --task regression'),
    ],
)
def test_wrong_shards_are_refused(write, y, meta, message):
    with pytest.raises(ShardError, match=message):
        load_shard(write(X, y, meta=meta))


def test_both_parts_have_the_same_columns(write):
    with pytest.raises(ShardError, match=r"has shape \(2,\) for training and \(1,\) for testing"):
        load_shard(write(X, BOTH, test=(X[:4], DOSE[:4]), meta=REGRESSION))


def test_a_shard_of_another_task_than_the_plans_is_refused(write):
    shard = load_shard(write(X, DOSE, meta=REGRESSION))
    with pytest.raises(ShapeMismatch, match=r"mine is for regression of 1 targets \(0\), but the model is for classes"):
        prepare(shard, plan_of("classes", [0]))
    with pytest.raises(ShapeMismatch, match=r"the model is for regression of 1 targets \(dose\)"):
        prepare(shard, plan_of("regression", ["dose"], Scale([0.0], [1.0])))
    with pytest.raises(SettingError, match="no single class by which it can be cut"):
        load_dataset(str(shard.path))


def table(tmp_path, name="site.csv"):
    path = tmp_path / name
    rows = [f"{a:.3f},{b:.3f},{dose},{-dose},{ill}" for (a, b, _), dose, ill in zip(X, DOSE, LABELS[:, 0], strict=True)]
    path.write_text("\n".join(["age,weight,dose,fall,ill", *rows]) + "\n")
    return path


def test_a_table_is_read_and_made_into_a_shard_alike(tmp_path):
    options = ReadOptions.of("dose, fall", apart=["ill"], task="regression")
    direct = load_shard(table(tmp_path), options=options)
    assert (direct.labels, direct.train_x.shape[1], direct.column_names) == (["dose", "fall"], 2, ("age", "weight"))
    made = make(table(tmp_path), MakeOptions.of(options, "", LENGTH, "", False, ""), tmp_path / "shard")
    assert load_shard(tmp_path / "shard").profile() == made.profile() == direct.profile()
    several = load_shard(table(tmp_path), options=ReadOptions.of("ill", columns="age", task="multilabel"))
    assert several.labels == ["ill"] and set(several.train_y.flatten()) == {0.0, 1.0}


def test_what_cannot_be_said_of_a_table_is_refused(tmp_path):
    with pytest.raises(SettingError, match="makes two classes of a number"):
        ReadOptions.of("dose>5", task="regression")
    with pytest.raises(SettingError, match="unknown task 'regresion'"):
        ReadOptions.of("dose", task="regresion")
    with pytest.raises(SettingError, match="no column 'dosis'"):
        load_shard(table(tmp_path), options=ReadOptions.of("dose,dosis", task="regression"))
    with pytest.raises(SettingError, match="'age', the class of"):
        load_shard(table(tmp_path), options=ReadOptions.of("age", columns="age", task="regression"))
    (tmp_path / "gap.csv").write_text("a,dose\n1,2\n3,\n")
    with pytest.raises(ShardError, match=r"1 samples of .* have nothing in the column 'dose'"):
        load_shard(tmp_path / "gap.csv", options=ReadOptions.of("dose", task="regression"))


def test_the_task_of_arrays_and_of_folders_that_do_not_say_it(write):
    assert shard_of("kiel", (X, DOSE), ReadOptions.of(task="regression")).profile.task == "regression"
    plain = write(X, DOSE)
    assert load_shard(plain, options=ReadOptions.of(task="regression")).task == "regression"
    said = write(X, LABELS, meta=MULTILABEL, name="said")
    assert load_shard(said).task == "multilabel"
    with pytest.raises(SettingError, match="says that the task is multilabel, and --task regression"):
        load_shard(said, options=ReadOptions.of(task="regression"))


@given(arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.floats(-1e99, 1e99)))
def test_any_finite_numbers_are_targets_and_stay_what_they_are(y):
    found = target_numbers(y, len(y), "y", "regression")
    assert found.dtype == np.float64 and np.array_equal(found, y)
    assert np.array_equal(target_numbers(y[:, 0], len(y), "y", "regression"), y[:, :1])


@given(arrays(np.int16, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=st.integers(-2, 3)))
def test_labels_are_zeros_and_ones_or_refused(y):
    if np.isin(y, (0, 1)).all():
        assert np.array_equal(target_numbers(y, len(y), "y", "multilabel"), y)
    else:
        with pytest.raises(ShardError, match="each must be 0 or 1"):
            target_numbers(y, len(y), "y", "multilabel")


@given(st.sampled_from([np.nan, np.inf, -np.inf, 1e101]), st.integers(0, 5))
def test_what_is_no_finite_number_is_named_with_its_sample(value, at):
    y = np.zeros((6, 2))
    y[at, 1] = value
    with pytest.raises(ShardError, match=f"holds 1 values .* in sample {at + 1};"):
        target_numbers(y, 6, "y", "regression")


ASKED = ReadOptions.of("months,died", task="survival")
SCHEMA = Schema.of({"age": Column("number"), "months": Column("time", unit="months"), "died": Column("event")})


def cohort_table(folder: Path, name: str = "kiel.csv", **cells: object) -> Path:
    """Write 24 patients; `cells` takes the place of what sample 3 has in a column."""
    rows = [{"age": 40 + n % 5, "months": 2.5 * n, "died": n % 2} | (cells if n == 2 else {}) for n in range(24)]
    path = folder / name
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    return path


def test_a_table_is_read_alike_by_options_and_by_a_schema(tmp_path: Path):
    plain = load_shard(cohort_table(tmp_path), options=ASKED)
    assert (plain.task, plain.labels, plain.column_names) == ("survival", ["months", "died"], ("age",))
    assert "2 columns" in plain.described and plain.profile().targets is None
    by_schema = load_shard(cohort_table(tmp_path), options=ReadOptions.of(schema=SCHEMA))
    assert by_schema.profile().task == "survival" and by_schema.labels == plain.labels and by_schema.schema == SCHEMA
    assert np.array_equal(by_schema.train_y, plain.train_y) and by_schema.train_y.shape[1] == 2
    spec = ModelSpec("any", "tabular", (1,), 1)
    ready = prepare(plain, Plan("f", 0, spec, ["months", "died"], "fedavg", {}, TrainSettings(validation=0.0), task="survival"))
    seen = np.concatenate([ready.train_y.numpy(), ready.test_y.numpy()])
    assert sorted(map(tuple, seen.tolist())) == sorted((2.5 * n, n % 2) for n in range(24)), "times are not scaled"


def test_describe_proposes_the_kinds_and_the_sites_agree(tmp_path: Path):
    proposed = describe(read_table(cohort_table(tmp_path)), ASKED)
    kinds = {name: column.kind for name, column in proposed.schema.columns.items()}
    assert kinds == {"age": "number", "months": "time", "died": "event"} and proposed.schema.feature_names == ["age"]
    assert "no column is the label: say --label NAME" not in proposed.warnings
    merged = merge_proposals({"kiel": proposed.schema, "lund": proposed.schema})
    assert merged == proposed.schema and schema_of_json(merged.to_json(), "it").time_and_event == ["months", "died"]
    lazy = LazyShard.on_disk(cohort_table(tmp_path), ReadOptions.of("months,died", task="survival", schema="auto"))
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
        load_shard(cohort_table(tmp_path, **cells), options=options)


def test_missing_columns_and_options_that_contradict_are_refused_by_name(tmp_path: Path):
    path = cohort_table(tmp_path)
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
