"""Tables by a schema where devices train with noise: nothing of one row's features follows from another row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attune
from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import AttuneError, SettingError, ShardError
from attune.common.plan import ModelSpec, Plan, Scale, standardisation
from attune.common.schema import Column, Schema
from attune.common.schema_file import write_schema
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.prepare import Prepared, prepare
from attune.fedclient.data.table_encoder import TableEncoder
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.scale import check_bounds

COLUMNS = {
    "age": Column("number", missing="indicator", range=(0.0, 100.0)),
    "seen": Column("date", range=(0.0, 10_000.0)),
    "sex": Column("category", values=["f", "m"]),
    "smoker": Column("yes/no", values=["no", "yes"]),
    "ill": Column("label"),
}
PRIVATE = PrivacySettings(unit="example", epsilon=4.0, orders=2)
ROWS = ["30,2010-03-01,f,no,0", ",2011-03-01,m,yes,1", "50,,x,,1", "70,2012-03-01,,no,0"] * 6


def written(folder: Path, rows: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kiel.csv"
    path.write_text("age,seen,sex,smoker,ill\n" + "\n".join(rows) + "\n")
    return path


def options(schema: Schema | None) -> ReadOptions:
    return ReadOptions.of("ill", schema=schema or "auto")


def prepared(path: Path, schema: Schema | None, privacy: PrivacySettings | None = PRIVATE) -> Prepared:
    shard = LazyShard.on_disk(path, options(schema))
    used = schema or Schema.of(COLUMNS)
    names = used.feature_names
    spec = ModelSpec("mlr", "tabular", (len(names),), 2)
    plan = Plan(
        "f", 0, spec, [0, 1], "fedavg", {}, TrainSettings(validation=0.0), column_names=names,
        privacy=privacy, schema=used, schema_digest=used.digest,
    )  # fmt: skip
    return prepare(shard.load_for(plan), plan)


def all_rows(made: Prepared) -> list[list[float]]:
    return sorted(torch.cat([made.train_x, made.validation_x, made.test_x]).tolist())


def test_features_are_scaled_and_filled_by_the_schema_alone(tmp_path: Path) -> None:
    """Compare with numbers by hand: 30 of 0 to 100 is -0.4, day 3712 of 0 to 10,000 is -0.2576. A gap is the middle, or no."""
    rows = all_rows(prepared(written(tmp_path, ROWS), Schema.of(COLUMNS)))
    first = [-0.4, 0.0, 3712 / 5000 - 1, 1.0, 0.0, 0.0, -1.0]
    second = [0.0, 1.0, 4077 / 5000 - 1, 0.0, 1.0, 0.0, 1.0]
    third = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0]
    expected = sorted([first, second, third, [0.4, 0.0, 4443 / 5000 - 1, 0.0, 0.0, 0.0, -1.0]] * 6)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_one_row_changes_no_feature_of_another(tmp_path: Path) -> None:
    """With the device's medians and deviations it would: that is what noise does not cover."""
    changed = ["99,2020-01-01,m,yes,0", *ROWS[1:]]
    schema = Schema.of(COLUMNS)
    here, there = (written(tmp_path / name, rows) for name, rows in (("a", ROWS), ("b", changed)))

    def beside(privacy: PrivacySettings | None) -> int:
        one, other = (all_rows(prepared(path, schema, privacy)) for path in (here, there))
        return sum(row in other for row in one)

    assert beside(PRIVATE) >= 23
    assert beside(None) == 0


def test_columns_without_a_range_are_named(tmp_path: Path) -> None:
    columns = COLUMNS | {"age": Column("number"), "seen": Column("date")}
    with pytest.raises(ShardError, match=r"no range for the columns age and seen|no range for the columns age, seen"):
        prepared(written(tmp_path, ROWS), Schema.of(columns))
    with pytest.raises(SettingError, match=r"the schema has none for the columns age"):
        check_bounds(PRIVATE, Schema.of(columns))
    check_bounds(PrivacySettings(), Schema.of(columns))
    check_bounds(PRIVATE, Schema.of(COLUMNS))
    with pytest.raises(SettingError, match=r"privacy\.ranges and a schema"):
        check_bounds(PrivacySettings(unit="example", epsilon=4.0, ranges=[(0.0, 1.0)]), Schema.of(COLUMNS))


def test_a_schema_that_the_device_has_proposed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="proposes a schema, which tells of its rows"):
        prepared(written(tmp_path, ROWS), None)


@pytest.mark.parametrize("schema", ["file", "auto"])
def test_a_federation_trains_with_noise_on_tables_by_the_operators_schema(tmp_path: Path, schema: str) -> None:
    write_schema(tmp_path / "schema.json", Schema.of(COLUMNS))
    for number in range(3):
        (tmp_path / f"site{number}.csv").write_bytes(written(tmp_path / "made", ROWS[number:]).read_bytes())
    settings: dict[str, Any] = {
        "train": {"local_epochs": 1},
        "privacy": {"unit": "example", "epsilon": 8.0, "insecure_seed": 1},
        "data": {"classes": [0, 1]},
    }
    given = str(tmp_path / "schema.json") if schema == "file" else "auto"

    def run() -> Any:
        return attune.simulate(
            str(tmp_path / "*.csv"), "fedavg", model="mlr", rounds=1, settings=settings, progress=False,
            label="ill", table={"schema": given},
        )  # fmt: skip

    if schema == "auto":
        with pytest.raises(AttuneError, match=r"range|proposes a schema"):
            run()
        return
    assert len(run().table()) == 3


OWN, PUBLIC, SCHEMA, SHARED, REFUSED = (
    "each device's own", "public ranges (privacy.ranges)", "of the schema", "over the", "refused",
)  # fmt: skip


@pytest.mark.parametrize("unit", ["none", "example", "client"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("described", [False, True], ids=["plain", "schema"])
@pytest.mark.parametrize("known", ["nothing", "ranges", "disclosed"])
def test_the_sentence_on_scales_says_what_is_done(tmp_path: Path, unit: Any, masked: bool, described: bool, known: str) -> None:
    """Compare the sentence of status and log with the scale that a device's samples get."""
    schema = Schema.of(COLUMNS) if described else None
    draws = np.random.default_rng(0)
    path = written(tmp_path, ROWS) if described else tmp_path / "kiel"
    if not described:
        path.mkdir()
        np.savez(path / "test.npz", x=np.zeros((4, 2), "f4"), y=np.arange(4) % 2)
        np.savez(path / "train.npz", x=draws.normal(3, 2, (30, 2)).astype("f4"), y=np.arange(30) % 2)
        (path / "meta.json").write_text('{"standardise": "federation"}')
    names = schema.feature_names if schema else []
    common = Scale([0.5] * (len(names) or 2), [4.0] * (len(names) or 2))
    ranges = [(-3.5, 4.5)] if known == "ranges" else []
    given = known == "disclosed" and unit == "none" and not described
    plan = Plan(
        "f", 0, ModelSpec("mlr", "tabular", (len(names) or 2,), 2), [0, 1], "fedavg", {}, TrainSettings(validation=0.0),
        common if given or (ranges and unit != "none") else None, names,
        privacy=PrivacySettings(unit=unit, ranges=ranges, secure_aggregation=masked), schema=schema,
        schema_digest=schema.digest if schema else "",
    )  # fmt: skip
    said = standardisation(plan)
    try:
        shard = LazyShard.on_disk(path, options(schema) if described else ReadOptions())
        scaling = prepare(shard.load_for(plan), plan).standardiser
    except ShardError:
        assert REFUSED in said
        return
    assert scaling is not None
    if plan.scale is not None and not (plan.is_private and described):
        used = SHARED if given else PUBLIC
        assert described or scaling.mean.tolist() == plan.scale.mean
    elif plan.is_private and described:
        used = SCHEMA
        assert scaling.mean.tolist() == TableEncoder(Schema.of(COLUMNS)).public_scale[0].tolist()
    else:
        used = OWN
        assert described or scaling.mean.tolist() == pytest.approx(
            np.load(path / "train.npz")["x"].mean(axis=0).tolist(), rel=1e-4
        )
    assert used in said and (not masked or not given or "in a masked sum" in said)
