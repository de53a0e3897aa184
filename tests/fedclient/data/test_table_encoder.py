"""Tables by a schema: describe proposes it, and the encoder applies it in training, evaluation and prediction."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from attune.common.errors import SettingError, ShardError
from attune.common.schema import Column, Schema
from attune.fedclient.data.describe import describe
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.site_sums import site_sums, unit_verdicts, units_of_shard, verdict_of
from attune.fedclient.data.table import DataTable, read_table
from attune.fedclient.data.table_encoder import TableEncoder, with_gaps
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.table_schemas import in_schema, merge_proposals

ROWS = 40
KINDS = {
    "case": "identifier",
    "age": "number",
    "sex": "category",
    "height_cm": "number",
    "seen": "date",
    "smokes": "yes/no",
    "zip": "category",
    "remark": "text",
    "ill": "label",
}


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a table as a hospital exports it."""
    lines = [",".join(KINDS)]
    for n in range(ROWS):
        seen = f"{n % 28 + 1:02}.{n % 12 + 1:02}.2024"
        cells = [f"K{n:04}", "" if n % 3 == 0 else 20 + n % 7, "fm"[n % 2], 160.5 + n % 5, seen, ("ja", "nein")[n % 2]]
        lines.append(",".join(map(str, [*cells, f"0{n % 2}117", f"came {n} times and went", ("no", "yes")[n % 4 == 0]])))
    path = tmp_path_factory.mktemp("site") / "kiel.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(**cells: list[object]) -> DataTable:
    return DataTable(Path("t.csv"), cells)


def encoded(schema: dict[str, Column], **cells: list[object]) -> list[list[float]]:
    return TableEncoder(Schema.of(schema)).encode(table(**cells)).x.tolist()


def test_kinds_are_proposed(patients: Path) -> None:
    schema = describe(read_table(patients), ReadOptions.of("ill")).schema
    assert {name: column.kind for name, column in schema.columns.items()} == KINDS
    assert schema.columns["age"].missing == "indicator" and schema.columns["height_cm"].unit == "cm"
    assert schema.columns["sex"].values == ["f", "m"] and schema.columns["zip"].values == ["00117", "01117"]
    warnings = " | ".join(describe(read_table(patients), ReadOptions.of("ill")).warnings)
    for words in ("case looks like an identifier", "names its unit, cm", "seen holds dates", "remark holds free text"):
        assert words in warnings


def test_only_values_of_ten_rows_may_leave() -> None:
    cells = table(ward=["A"] * 10 + ["B"] * 9 + ["secret name"], a=[0.5 * (n % 4) for n in range(20)], y=[0, 1] * 10)
    schema = describe(cells, ReadOptions.of("y")).schema
    assert schema.columns["ward"].values == ["A"] and b"secret" not in schema.to_json() and b'"B"' not in schema.to_json()


def test_what_is_strange_is_said() -> None:
    cells = table(
        y=["a", "b"] * 10,
        same=[3, 4] * 10,
        one=[7] * 20,
        gaps=[None] * 15 + [1, 2, 3, 4, 5],
        mixed=["low", *(0.5 * n for n in range(19))],
        day=[f"{n % 9 + 1}/{n % 7 + 1}/2024" for n in range(20)],
        none=[None] * 20,
        a=[0.1 * (n % 6) for n in range(20)],
    )
    said = " | ".join(describe(cells, ReadOptions.of("y")).warnings)
    for words in (
        "same equals the label y",
        "one is constant",
        "gaps is mostly missing: 15 of 20",
        "mixed mixes kinds: 19 of 20 cells are numbers, others are low",
        "day could be day/month/year or month/day/year",
        "none has no value at all",
    ):
        assert words in said


def test_words_for_yes_and_no_are_proposed_as_they_are_written() -> None:
    """Beside a category of another site they are its values: `Yes` would count as `other` there if `yes` were proposed."""

    def proposal(words: list[str]) -> Schema:
        cells = table(s=[words[n % len(words)] for n in range(60)], y=[0, 1] * 30, a=[0.5 * (n % 4) for n in range(60)])
        return describe(cells, ReadOptions.of("y")).schema

    both, three = proposal(["Yes", "No"]), proposal(["Yes", "No", "Unknown"])
    assert merge_proposals({"kiel": both, "lund": three}).columns["s"].values == ["No", "Unknown", "Yes"]
    with pytest.raises(SettingError, match=r"values look alike.*'YES' \(kiel\) and 'Yes' \(lund\)"):
        merge_proposals({"kiel": proposal(["YES", "NO"]), "lund": three})
    assert proposal(["YES", "No", "yes", "no", "no"]).columns["s"].kind == "yes/no"


@pytest.mark.parametrize("cells", [["0,5", "1,0"], ["1", "1,5"], [f"{n},{n % 10}" for n in range(20)]])
def test_numbers_with_a_comma_are_said(cells: list[str]) -> None:
    cells = [cells[n % len(cells)] for n in range(20)]
    said = describe(table(dose=list(cells), y=[0, 1] * 10, a=[0.5, 1.5] * 10), ReadOptions.of("y")).warnings
    assert any(warning.startswith("dose holds numbers with a comma") for warning in said), said


def test_day_and_month_are_told_apart_by_what_cannot_be() -> None:
    y, a = [0, 1] * 5, [0.5, 1.5] * 5
    assert describe(table(d=["3/13/2024"] * 10, y=y, a=a)).schema.columns["d"].form == "month/day/year"
    assert describe(table(d=["13/3/2024"] * 10, y=y, a=a)).schema.columns["d"].form == "day/month/year"
    assert describe(table(d=["13/3/2024", "3/13/2024"] * 5, y=y, a=a)).schema.columns["d"].kind == "category"


def test_each_kind_becomes_features() -> None:
    schema = {
        "a": Column("number", missing="indicator"),
        "c": Column("category", values=["f", "m"], missing="indicator"),
        "d": Column("date", origin="2024-01-01"),
        "e": Column("category", values=["x", "y"], encoding="embedding"),
        "s": Column("yes/no", values=["nein", "ja"]),
    }
    x = np.array(
        encoded(
            schema,
            a=["1.5", None],
            c=["m", "new"],
            d=["2024-01-02 12:00", "31.12.2023"],
            e=["y", "new"],
            s=["yes", "NEIN"],
        )
    )
    assert np.array_equal(x[0], [1.5, 0, 0, 1, 0, 0, 1.5, 1, 1])
    assert np.array_equal(x[1], [np.nan, 1, 0, 0, 1, 0, -1, 2, 0], equal_nan=True)


def test_a_column_that_is_not_there_counts_as_missing() -> None:
    schema = {
        "a": Column("number", range=(0, 10)),
        "b": Column("number", missing="indicator"),
        "c": Column("category", values=["f"]),
    }
    x = np.array(encoded(schema, a=[1, 2]))
    assert np.array_equal(x, [[1, np.nan, 1, 0, 0], [2, np.nan, 1, 0, 0]], equal_nan=True)
    with pytest.raises(ShardError, match="none of the columns"):
        encoded(schema, z=[1])


def test_cells_of_another_kind_are_named() -> None:
    with pytest.raises(ShardError, match="'a' holds no number in sample 2, 'd' holds no date in sample 1 and 1 more") as raised:
        encoded({"a": Column("number"), "d": Column("date")}, a=[1, "Mr Smith"], d=["soon", "later"])
    assert "Smith" not in str(raised.value)  # the server is told why a device takes no part
    with pytest.raises(ShardError, match=r"a \(1\).*refuse"):
        encoded({"a": Column("number", missing="refuse")}, a=[1, None])


def test_the_owner_says_which_columns_may_be_used(patients: Path) -> None:
    schema = describe(read_table(patients), ReadOptions.of("ill")).schema
    shard = load_shard(patients, options=ReadOptions.of("ill", columns="height_cm,sex", schema=schema))
    ages = shard.train_x[:, shard.column_names.index("age missing")]
    assert (ages == 1).all() and "age" in " ".join(shard.warnings)


def test_a_shard_keeps_its_schema(patients: Path, tmp_path: Path) -> None:
    schema = describe(read_table(patients), ReadOptions.of("ill")).schema
    file = tmp_path / "schema.json"
    file.write_bytes(schema.to_json())
    direct = load_shard(patients, options=ReadOptions.of(schema=str(file)))
    make(patients, MakeOptions.of(ReadOptions.of(schema=str(file)), "", 128, "", False, ""), tmp_path / "out")
    kept = load_shard(tmp_path / "out")
    assert kept.schema == direct.schema == schema and kept.column_names == tuple(schema.feature_names)
    assert kept.fill is not None and np.isfinite(kept.train_x).all() and len(kept.train_x) == 30
    meta = tmp_path / "out" / "meta.json"
    meta.write_bytes(meta.read_bytes().replace(b'"age missing"', b'"age"', 1))
    with pytest.raises(ShardError, match="not the features of its schema"):
        load_shard(tmp_path / "out")


def test_the_servers_schema_gives_no_column_a_role(patients: Path) -> None:
    shard = LazyShard.on_disk(patients, ReadOptions.of("ill", schema="auto"))
    assert isinstance(shard.profile.proposal, Schema) and shard.profile.schema is msgspec.UNSET
    columns = {**shard.profile.proposal.columns, "remark": Column("split"), "case": Column("label"), "sex": Column("group")}
    plan = make_plan(resolve({"data": {"columns": columns}}), {"kiel": in_schema(shard.profile, Schema.of(columns))}, "f")
    loaded = shard.load_for(plan)
    assert loaded.labels == ["no", "yes"] and loaded.groups is None and loaded.schema == plan.schema


def test_a_file_without_schema_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[data]\nkind = 'tabular'\n")
    with pytest.raises(SettingError, match=r"no section \[data\.columns\.NAME\]"):
        ReadOptions.of(schema=str(tmp_path / "s.toml"))
    with pytest.raises(SettingError, match="cannot read the schema"):
        ReadOptions.of(schema=str(tmp_path / "s.json"))


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1, "fits"), (10, "factor 10"), (0.01, "factor 10"), (1 / 2.54, "factor 2.54"), (2.54, "factor 2.54"), (1.8, "differs")],
)
def test_units_are_told_by_one_word(factor: float, verdict: str) -> None:
    heights = np.random.default_rng(0).normal(172, 9, 200)
    assert verdict_of(heights * factor, (150, 195)) == verdict


def test_units_of_a_column_that_is_not_there_are_not_told() -> None:
    schema = {"h": Column("number", range=(150, 195), missing="indicator"), "w": Column("number", range=(40, 120))}
    whole = Schema.of(schema)
    x = TableEncoder(whole).encode(table(w=[0.4 + 0.05 * n for n in range(12)])).x
    assert unit_verdicts(x, whole) == {"w": "factor 10"}
    filled = np.nan_to_num(x, nan=170.0)  # as a shard has it
    assert unit_verdicts(with_gaps(filled, whole), whole) == {"w": "factor 10"}


def test_a_shard_has_verdicts_only_on_columns_with_a_range_in_its_schema(patients: Path) -> None:
    columns = describe(read_table(patients), ReadOptions.of("ill")).schema.columns
    columns = {**columns, "age": replace(columns["age"], range=(200.0, 260.0))}  # the ages are 20 to 26
    shard = load_shard(patients, options=ReadOptions.of("ill", schema=Schema(columns)))
    assert units_of_shard(shard) == {"age": "factor 10"}
    assert units_of_shard(load_shard(patients, options=ReadOptions.of("ill", columns="age", missing="median"))) == {}


def test_statistics_count_what_is_missing(patients: Path) -> None:
    schema = describe(read_table(patients), ReadOptions.of("ill")).schema
    sums = site_sums(load_shard(patients, options=ReadOptions.of("ill", schema=schema))).columns["age"]
    assert (sums.rows, sums.missing) == (26, 14) and 20 <= sums.mean <= 26
