"""The same sample is prepared alike in training and prediction, whatever file, type or table it comes in."""

from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec, Plan, Scale
from attune.common.schema import Column, Schema
from attune.fedclient.data.cells import is_missing, words_of
from attune.fedclient.data.new_samples import new_samples
from attune.fedclient.data.prepare import prepare, prepare_features
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.data.standardiser import with_nan
from attune.fedclient.model import portable
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.model_info import ModelInfo
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.datasets import load_source

SEX_AND_SMOKES = Schema.of(
    {
        "age": Column("number"),
        "sex": Column("category", values=["f", "m"]),
        "smokes": Column("yes/no", values=["no", "yes"]),
        "state": Column("label"),
    }
)


def patients(path: Path) -> Path:
    rows = [f"{50 + n % 9},{'mf'[n % 2]},{('no', 'yes')[n // 2 % 2]},{('well', 'ill')[n % 2]}" for n in range(40)]
    path.write_text("\n".join(["age,sex,smokes,state", *rows]) + "\n")
    return path


def plan_of(shard: Shard, **changed: Any) -> Plan:
    spec = ModelSpec("any", shard.kind, shard.train_x.shape[1:], len(shard.labels), 0)
    if shard.schema is not None:
        changed |= {"schema": shard.schema, "schema_digest": shard.schema.digest}
    return Plan("f", 0, spec, shard.labels, "fedavg", {}, TrainSettings(), **changed)


def model_of(shard: Shard) -> Model:
    """Return a model with drawn weights that prepares samples as the shard's device does."""
    plan, spec = plan_of(shard), default_spec(shard.kind, shard.train_x.shape[1:], 2, 0, "dnn", {})
    standardiser = prepare(shard, plan).standardiser
    assert standardiser is not None
    info = ModelInfo("a", "f", "fedavg", {}, spec, shard.labels, TrainSettings(), standardiser=standardiser.to_dict())
    return Model(info, {"personalized": tensors_of(build(spec, 0))})


def test_a_number_for_missing_values_is_no_value_of_a_category(tmp_path: Path) -> None:
    """`--missing-words usual,0` is about cells. The zeros of one-hot features and of `no` are none."""
    path = patients(tmp_path / "kiel.csv")
    plain, given = (
        load_shard(path, options=ReadOptions.of(schema=SEX_AND_SMOKES, missing_words=words)) for words in ("", "usual,0")
    )
    assert np.array_equal(plain.train_x, given.train_x) and np.array_equal(plain.test_x, given.test_x)


@pytest.mark.parametrize("cell", ["-99.9", "-99.90", -99.9, Decimal("-99.90"), np.float32(-99.9)])
def test_a_number_for_missing_values_is_known_in_every_form(cell: Any) -> None:
    assert is_missing(cell, words_of(["usual", "-99.9"])) and is_missing(cell, words_of(["-99.90"]))
    assert not is_missing(cell, words_of(["usual", "-99"])) and not is_missing("099.9", words_of(["99.9"]))
    assert is_missing(Decimal("-9.00"), words_of(["-9"]))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_number_for_missing_values_is_found_in_narrow_floats(kind: type) -> None:
    assert np.isnan(with_nan(np.array([[-99.9, 1]], kind), "tabular", ["-99.9"])).tolist() == [[True, False]]


def test_numbers_for_missing_values_are_none_in_prediction_too(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    x[::5, 0] = -999
    np.savez(tmp_path / "t.npz", train_x=x, train_y=y)
    model = model_of(load_shard(tmp_path / "t.npz", options=ReadOptions.of(missing="median", missing_words="usual,-999")))
    gaps = np.where(x == -999, np.float32(np.nan), x)
    assert model.predict(x) == model.predict(gaps)
    assert portable.export(model, tmp_path / "out.pt2", x) <= portable.TOLERANCE
    program = torch.export.load(str(tmp_path / "out.pt2")).module()
    assert torch.equal(program(torch.from_numpy(x)), program(torch.from_numpy(gaps)))


def test_numbers_for_missing_values_are_none_where_a_data_set_is_cut(tmp_path: Path) -> None:
    x, y = np.arange(80.0).reshape(40, 2), np.arange(40) % 2
    x[3, 1] = -999
    np.savez(tmp_path / "t.npz", x=x, y=y)
    cut = load_source(str(tmp_path / "t.npz"), options=ReadOptions.of(missing="median", missing_words="usual,-999"))
    assert cut.train_x.min() >= 0


@pytest.mark.parametrize("kind", ["tabular", "series"])
def test_the_type_of_whole_numbers_does_not_matter(write: Any, kind: str) -> None:
    shape = (80, 3) if kind == "tabular" else (80, 4, 3)
    x = np.random.default_rng(0).integers(0, 200, shape)
    meta = {"kind": kind, "standardise": "federation"}
    shards = [load_shard(write(x.astype(form), np.arange(80) % 2, None, meta)) for form in (np.uint8, np.int64, np.float32)]
    for scale in (None, Scale([100.0] * 3, [50.0] * 3)):
        plan = plan_of(shards[0], scale=scale)
        one, *others = [prepare(shard, plan) for shard in shards]
        for other in others:
            assert torch.allclose(one.train_x, other.train_x, atol=1e-6)
        assert 0.1 < float(one.train_x.std()) < 10
        taken: list[npt.NDArray[Any]] = [x[:4].astype(form) for form in (np.uint8, np.int16, np.float64)]
        made = [prepare_features(part, plan.model, one.standardiser) for part in taken]
        assert torch.allclose(made[0], made[1]) and torch.allclose(made[0], made[2])


@pytest.mark.parametrize("label", ["smokes", "age>54", "sex"])
def test_what_is_to_be_predicted_is_no_feature_of_a_schema(tmp_path: Path, label: str) -> None:
    with pytest.raises(SettingError, match="a feature in the schema"):
        load_shard(patients(tmp_path / "kiel.csv"), options=ReadOptions.of(label, schema=SEX_AND_SMOKES))


@pytest.mark.parametrize("role", ["group", "key"])
def test_a_column_with_a_role_is_no_feature_of_a_schema(tmp_path: Path, role: str) -> None:
    """Leave the column out, as without a schema: a model would learn the number of a case by heart."""
    shard = load_shard(patients(tmp_path / "kiel.csv"), options=ReadOptions.of(schema=SEX_AND_SMOKES, **{role: "age"}))
    assert len(np.unique(shard.train_x[:, 0])) == 1


def test_a_test_mark_is_no_feature_of_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "kiel.csv"
    path.write_text("age,part,y\n" + "".join(f"{n % 9},{('train', 'test')[n % 4 == 0]},{n % 2}\n" for n in range(40)))
    columns = {"age": Column("number"), "part": Column("category", values=["test", "train"]), "y": Column("label")}
    shard = load_shard(path, options=ReadOptions.of(split="part", schema=Schema.of(columns)))
    assert not shard.train_x[:, 1:].any()


@pytest.mark.parametrize("missing", ["fill", "indicator"])
@pytest.mark.parametrize("apart", [("dose",), ()])
def test_a_column_that_was_never_seen_in_training_changes_no_prediction(
    tmp_path: Path, apart: tuple[str, ...], missing: Literal["fill", "indicator"]
) -> None:
    """A device that lacks a column knows no scale for it. When its new samples have it, they must not go in unscaled."""
    columns = {"age": Column("number"), "dose": Column("number", missing=missing), "y": Column("label")}
    schema = Schema.of(columns)
    rows = [f"{n % 9},{180 + n if apart else ''},{n % 2}" for n in range(40)]
    (tmp_path / "kiel.csv").write_text("\n".join(["age,dose,y", *rows]) + "\n")
    shard = load_shard(tmp_path / "kiel.csv", options=ReadOptions.of(apart=apart, schema=schema))
    prepared = prepare(shard, plan_of(shard))

    def samples(dose: str) -> torch.Tensor:
        (tmp_path / "new.csv").write_text(f"age,dose\n3,{dose}\n4,{dose}\n")
        x = new_samples([str(tmp_path / "new.csv")], plan_of(shard).model, schema=schema).x
        return prepare_features(x, plan_of(shard).model, prepared.standardiser)

    assert torch.allclose(samples("180"), samples(""), atol=1e-20)
    assert torch.allclose(samples("180")[:, 1:], prepared.train_x[:2, 1:], atol=1e-20)
