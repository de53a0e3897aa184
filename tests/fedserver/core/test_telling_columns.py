"""Columns by which a model can tell a site are said, with the site."""

from __future__ import annotations

from attune.common.schema import Column, Schema
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
