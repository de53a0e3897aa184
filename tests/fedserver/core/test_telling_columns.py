"""Columns by which a model can tell a site are said, with the site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attune.common.schema import Column, Schema
from attune.fedclient.data.describe import describe
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.table_schemas import merge_proposals, telling


def proposal(clinic: list[str], **more: Column) -> Schema:
    columns = {"age": Column("number"), "ill": Column("label"), "sex": Column("category", values=["f", "m"])}
    return Schema.of(columns | {"clinic": Column("category", values=clinic)} | more)


def test_values_and_columns_of_one_site_are_said() -> None:
    sites = {
        "kiel": proposal(["Kiel"], ward=Column("number"), dose=Column("number")),
        "lund": proposal(["Lund"], dose=Column("number")),
        "oslo": proposal(["Oslo"]),
    }
    said = telling(merge_proposals(sites), sites)
    assert ["clinic tells this site" in " ".join(said[name]) for name in sites] == [True] * 3
    assert "ward tells this site: no other site has the column" in " ".join(said["kiel"])
    assert "dose tells this site: it alone lacks the column" in " ".join(said["oslo"])
    assert not any(name in str(said) for name in ("age", "sex", "ill"))


def test_what_several_sites_have_tells_none() -> None:
    sites = {"kiel": proposal(["A", "B"]), "lund": proposal(["B", "C"]), "oslo": proposal(["C", "A"])}
    assert not any(telling(merge_proposals(sites), sites).values())
    out = {name: Schema.of({**schema.columns, "clinic": Column("text", left_out="out")}) for name, schema in sites.items()}
    assert not any(telling(merge_proposals(out), out).values())
    assert not any(telling(sites["kiel"], {"kiel": sites["kiel"]}).values())


def table(folder: Path, site: str, **more: Callable[[int], object]) -> Path:
    cells: dict[str, Callable[[int], object]] = {
        "age": lambda n: 40 + n % 30, "clinic": lambda n: site, "number": lambda n: len(site), **more, "ill": lambda n: n % 2
    }  # fmt: skip
    path = folder / f"{site}.csv"
    lines = [",".join(cells), *(",".join(str(cell(n)) for cell in cells.values()) for n in range(60))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_constant_of_one_site_neither_leaves_it_nor_becomes_a_feature(tmp_path: Path) -> None:
    paths = {
        "Kiel": table(tmp_path, "Kiel", ward=lambda n: "North", smoker=lambda n: "no", scanner=lambda n: "A"),
        "Husum": table(tmp_path, "Husum", smoker=lambda n: "yes" if n % 3 else "no", scanner=lambda n: "AB"[n % 3 > 0]),
    }
    sites = {name: describe(read_table(path), ReadOptions.of("ill")).schema for name, path in paths.items()}
    assert not any(word in str(schema) for word in ("'Kiel'", "'Husum'", "'North'") for schema in sites.values())
    merged = merge_proposals(sites)
    assert merged.used.keys() == {"age", "smoker", "scanner"}
    assert merged.columns["smoker"].values == ["no", "yes"] and merged.columns["scanner"].values == ["A", "B"]
    assert not any(telling(merged, sites).values())
    shard = load_shard(paths["Kiel"], options=ReadOptions.of("ill", schema=merged))
    assert shard.train_x.shape[1] == len(merged.feature_names)


def test_a_box_that_is_ticked_or_empty_is_not_constant(tmp_path: Path) -> None:
    proposal = describe(read_table(table(tmp_path, "Kiel", smoker=lambda n: "x" if n % 2 else "")), ReadOptions.of("ill"))
    assert proposal.schema.used["smoker"].missing == "indicator"
    assert not any(text.startswith("smoker is constant") for text in proposal.warnings)
