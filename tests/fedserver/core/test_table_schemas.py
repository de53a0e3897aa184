"""One schema of many sites' proposals, and the conflicts that stop it."""

from __future__ import annotations

import msgspec
import pytest

from attune.common.errors import SettingError, ShapeMismatch
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Column, Schema
from attune.fedserver.core import data_form
from attune.fedserver.core.fleet_statistics import ColumnStatistics, FleetStatistics
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.table_schemas import merge_proposals, united, with_ranges

LABEL = {"ill": Column("label")}
AGE = {"age": Column("number")}


def site(**columns: Column) -> Schema:
    return Schema.of({**AGE, **LABEL, **columns})


def test_values_and_columns_are_united() -> None:
    merged = merge_proposals(
        {
            "kiel": site(
                sex=Column("category", values=["f"]), h=Column("number", unit="cm"), n=Column("yes/no", values=["0", "1"])
            ),
            "lund": site(sex=Column("category", values=["m"]), h=Column("number"), n=Column("number")),
            "oslo": site(sex=Column("category", left_out="rare"), ward=Column("category", values=[f"w{n}" for n in range(20)])),
        }
    )
    assert merged.columns["sex"] == Column("category", values=["f", "m"])
    assert merged.columns["h"] == Column("number", unit="cm", missing="indicator")
    assert (merged.columns["n"].kind, merged.columns["ward"].encoding) == ("number", "embedding")


def test_columns_that_a_site_lacks_can_be_left_out_for_all() -> None:
    merged = merge_proposals({"kiel": site(h=Column("number")), "lund": site()}, common=True)
    assert merged.left_out == {"h": "a site lacks it"} and merged.feature_names == ["age"]


CONFLICTS = [
    ({"kiel": site(h=Column("number")), "lund": site(h=Column("date"))}, "h: number in kiel; date in lund: .*`kind`"),
    (
        {"kiel": site(h=Column("number", unit="cm")), "lund": site(h=Column("number", unit="inch"))},
        "h: the units differ, cm in kiel; inch in lund",
    ),
    (
        {"kiel": site(d=Column("date", form="day/month/year")), "lund": site(d=Column("date", form="month/day/year"))},
        "d: dates are written in different orders",
    ),
    (
        {"kiel": site(s=Column("category", values=["Type A"])), "lund": site(s=Column("category", values=["type a"]))},
        r"s: values look alike, 'Type A' \(kiel\) and 'type a' \(lund\)",
    ),
    (
        {"kiel": site(height_cm=Column("number", unit="cm")), "lund": site(height_in=Column("number", unit="in"))},
        r"height_cm \(kiel\) and height_in \(lund\) seem to be one column",
    ),
    ({"kiel": site(), "lund": Schema.of(AGE)}, "lund: no column ill, the label"),
]


@pytest.mark.parametrize(("proposals", "words"), CONFLICTS)
def test_a_conflict_is_named_with_its_remedy(proposals: dict[str, Schema], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        merge_proposals(proposals)


def test_every_conflict_has_a_line() -> None:
    kiel, lund = site(h=Column("number"), s=Column("number")), site(h=Column("date"), s=Column("date"))
    with pytest.raises(SettingError, match="2 conflicts") as raised:
        merge_proposals({"kiel": kiel, "lund": lund})
    assert str(raised.value).count("\n") == 2


def test_the_operator_decides() -> None:
    proposals, _ = CONFLICTS[0]
    assert merge_proposals(proposals, {"h": Column("number")}).columns["h"] == Column("number")


def profile(proposal: Schema | None = None, schema: Schema | None = None) -> Profile:
    names = (proposal or schema or site()).feature_names
    given = {"proposal": proposal or msgspec.UNSET, "schema": schema or msgspec.UNSET}
    return Profile("tabular", (len(names),), ["no", "yes"], 30, 10, column_names=names, **given)


def test_devices_that_propose_get_one_schema_in_the_plan() -> None:
    profiles = {"kiel": profile(site(h=Column("number"))), "lund": profile(site())}
    together, odd = united(profiles, None)
    agreed = data_form.agree(together)
    plan = make_plan(resolve({"method": {"name": "fedavg"}}), agreed.agreed, "f")
    assert not odd and not agreed.odd and plan.schema is not None and plan.schema_digest == plan.schema.digest
    assert plan.column_names == ["age", "h", "h missing"] and plan.model.shape == (3,)
    data_form.check_fits(profile(site()), plan, "late")
    with pytest.raises(ShapeMismatch, match="another schema than this federation's"):
        in_metres = {**plan.schema.columns, "h": Column("number", missing="indicator", unit="m")}
        data_form.check_fits(profile(schema=Schema.of(in_metres)), plan, "late")
    with pytest.raises(ShapeMismatch, match="start it with --schema auto"):
        data_form.check_fits(profile(), plan, "late")


def test_a_plan_without_schema_has_the_bytes_that_it_had() -> None:
    plan = make_plan(resolve({"method": {"name": "fedavg"}}), {"a": profile()}, "f")
    assert plan.schema is None and b"schema" not in msgspec.json.encode(plan)


def test_one_device_alone_brings_no_schema() -> None:
    profiles = {"kiel": profile(schema=site(h=Column("number"))), "lund": profile(site()), "oslo": profile(site())}
    with pytest.raises(SettingError, match="declare the schema in the settings"):
        united(profiles, None)
    schema = site(h=Column("number"))
    same = {"kiel": profile(schema=schema), "lund": profile(schema=schema), "oslo": profile(site())}
    assert united(same, None)[0]["oslo"].schema == schema


def test_the_operator_declares_a_schema() -> None:
    settings = resolve({"data": {"columns": {"age": {"kind": "number", "unit": "years"}}}})
    declared = settings.data.schema
    assert declared == Schema.of({"age": Column("number", unit="years")}) and settings.data.names == []
    together, odd = united({"kiel": profile(site()), "odd": profile()}, declared)
    assert together["kiel"].schema == declared and list(odd) == ["odd"]
    data_form.check_declared(profile(site()), settings.data, "kiel")
    with pytest.raises(ShapeMismatch, match="another schema"):
        data_form.check_declared(profile(schema=site()), settings.data, "kiel")
    assert DataSettings(columns=["a"]).names == ["a"] and DataSettings(columns=["a"]).schema is None


@pytest.mark.parametrize("columns", [101, 1000])
def test_a_device_that_proposes_many_times_the_usual_features_is_refused_by_name(columns: int) -> None:
    usual, flood = profile(site()), profile(site(**{f"c{number}": Column("number") for number in range(columns)}))
    refused = data_form.too_many_features({"ada": usual, "bob": usual, "eve": flood}, {})
    assert set(refused) == {"eve"} and "data.columns" in str(refused["eve"])
    fakes = {f"fake{number}": flood for number in range(8)}
    assert set(data_form.too_many_features({"ada": usual, "bob": usual, **fakes}, dict.fromkeys(fakes, "stolen"))) == set(fakes)


def test_ranges_are_those_of_five_devices_or_more() -> None:
    quantiles = {"0.01": 18.0, "0.99": 90.0}
    merged = merge_proposals({"kiel": site(h=Column("number", range=(1, 2)))})
    many, few = (ColumnStatistics(devices, rows=100, quantiles=quantiles) for devices in (5, 4))
    assert with_ranges(merged, FleetStatistics(5, {}, columns={"age": many, "h": many})).columns == merged.columns | {
        "age": Column("number", range=(18.0, 90.0))
    }
    assert with_ranges(merged, FleetStatistics(5, {}, columns={"age": few})) == merged
