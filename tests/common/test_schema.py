"""The schema of a table: its one form as JSON and TOML, its checks, and the features that follow from it."""

import sys

import pytest

from attune.common.errors import SettingError
from attune.common.schema import Column, Schema, columns_of_table, name_and_unit, schema_of_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = Schema.of(
    {
        "sex": Column("category", values=["f", "m"], missing="indicator"),
        "age": Column("number", unit="years", range=(18, 90)),
        "seen": Column("date"),
        "ward": Column("category", values=[f"w{n}" for n in range(20)], encoding="embedding"),
        "smokes": Column("yes/no", values=["no", "yes"], missing="indicator"),
        "case": Column("identifier"),
        "ill": Column("label"),
    }
)


def test_the_features_of_a_sample() -> None:
    names = ["age", "seen", "sex=f", "sex=m", "sex other", "sex missing", "smokes", "smokes missing", "ward"]
    assert SCHEMA.feature_names == names
    assert SCHEMA.embedded == {"8": 22} and SCHEMA.features()[0].neutral == 54
    assert list(SCHEMA.left_out) == ["case"] and SCHEMA.with_kind("label") == ["ill"]


def test_equal_schemas_have_equal_bytes() -> None:
    turned = Schema.of(dict(reversed(SCHEMA.columns.items())))
    assert turned.to_json() == SCHEMA.to_json() and turned.digest == SCHEMA.digest
    assert schema_of_json(SCHEMA.to_json(), "it") == SCHEMA
    assert schema_of_json(SCHEMA.to_json(), "it").to_json() == SCHEMA.to_json()
    assert Schema.of({**SCHEMA.columns, "age": Column("number")}).digest != SCHEMA.digest


def test_the_form_for_the_operator_is_toml() -> None:
    columns = tomllib.loads(SCHEMA.to_toml())["data"]["columns"]
    assert Schema.of(columns_of_table(columns, "schema.toml")) == SCHEMA


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (Column("category"), "without `values`"),
        (Column("yes/no", values=["yes"]), "two `values`"),
        (Column("number", range=(3, 3)), "`range`"),
        (Column("number", range=(0, float("inf"))), "`range`"),
        (Column("date", origin="31.12.2024"), "`origin`"),
        (Column("category", values=["a", "a"]), "twice"),
        (Column("category", values=["a\nb"]), "printed"),
        (Column("text"), "no column for features"),
    ],
)
def test_a_wrong_column_is_named(column: Column, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Schema.of({"x": column})


def test_names_of_features_differ() -> None:
    with pytest.raises(SettingError, match="a column name twice"):
        Schema.of({"a": Column("category", values=["b"]), "a=b": Column("number")})


def test_what_is_no_schema_says_so() -> None:
    with pytest.raises(SettingError, match=r"it holds no schema"):
        schema_of_json(b'{"columns": {"a": {"kind": "nummer"}}}', "it")
    with pytest.raises(SettingError, match="newer version"):
        schema_of_json(b'{"columns": {"a": {"kind": "number"}}, "format": 2}', "it")
    with pytest.raises(SettingError, match=r"no 'knd'.*kind"):
        columns_of_table({"a": {"knd": "number"}}, "schema.toml")
    with pytest.raises(SettingError, match=r"the kinds are number, category"):
        columns_of_table({"a": {"kind": "nummer"}}, "schema.toml")


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("crp_mg_l", "mg_l"), ("glucose_mmol_l", "mmol_l"), ("ferritin_ug_l", "ug_l"), ("hb_g_dl", "g_dl"),
        ("tsh_mu_l", "mu_l"), ("height_cm", "cm"), ("volume_l", "l"), ("bmi_kg_m2", "kg_m2"), ("model_xl", ""),
    ],
)  # fmt: skip
def test_a_unit_is_whole(name: str, unit: str) -> None:
    assert name_and_unit(name) == (name.removesuffix(f"_{unit}") if unit else name, unit)
