"""Shards of tasks other than classes: how they are read, checked, described and prepared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attune.common.config import TrainSettings
from attune.common.errors import SettingError, ShapeMismatch, ShardError
from attune.common.plan import ModelSpec, Plan, Scale
from attune.fedclient.data.labels import target_numbers
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions
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
    with pytest.raises(ShardError, match="has 2 columns for training and 1 for testing"):
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
