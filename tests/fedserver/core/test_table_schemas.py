"""One schema of many sites' proposals, and the conflicts that stop it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from attune.common.errors import SettingError, ShapeMismatch
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Column, Schema
from attune.fedclient.data.describe import describe
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core import data_form
from attune.fedserver.core.ballot import united
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.table_schemas import merge_proposals, telling, with_ranges
from attune.fedserver.surveys.fleet_statistics import ColumnStatistics, FleetStatistics

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
    (
        {"kiel": Schema.of({**AGE, "krank": Column("label")}), "lund": site(), "oslo": site()},
        r"a conflict .*:\nthe label has several names, ill in lund, oslo; krank in kiel: .* --map krank=ill in kiel$",
    ),
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


FLOODS = [
    {f"c{number}": Column("text") for number in range(101)},
    {f"{number}{'ü' * 250}": Column("number", left_out="ü" * 256) for number in range(90)},
    *({"c": Column("category", values=[*map(str, range(4096))], encoding="embedding", left_out=why)} for why in ("", "rare")),
]


@pytest.mark.parametrize("columns", FLOODS)
def test_a_device_that_proposes_many_times_the_usual_features_is_refused_by_name(columns: dict[str, Column]) -> None:
    usual, flood = profile(site()), profile(site(**columns))
    refused = data_form.too_many_features({"ada": usual, "bob": usual, "eve": flood}, {})
    assert set(refused) == {"eve"} and "data.columns" in str(refused["eve"])
    fakes = {f"fake{number}": flood for number in range(8)}
    assert set(data_form.too_many_features({"ada": usual, "bob": usual, **fakes}, dict.fromkeys(fakes, "stolen"))) == set(fakes)


ODD = {
    "another kind": site(h=Column("date")),
    "another unit": site(h=Column("number", unit="inch")),
    "a text": site(h=Column("text")),
    "dates in another order": site(h=Column("number", unit="cm"), d=Column("date", form="month/day/year")),
    "a value that looks alike": site(s=Column("category", values=["type a"])),
    "too many values": site(s=Column("category", values=[f"v{number}" for number in range(4096)], encoding="embedding")),
    "the other order of no and yes": site(smokes=Column("yes/no", values=["yes", "no"])),
    "another label": Schema.of({**AGE, "sick": Column("label")}),
    "two labels": site(extra=Column("label")),
    "another group": site(mine=Column("group")),
    "a name of a feature": site(**{"s=Type A": Column("number")}),
    "a name that is almost the same": Schema.of({**LABEL, **AGE, "H": Column("number", unit="cm")}),
    "a name of another unit": site(h_in=Column("number", unit="in")),
}
USUAL = site(
    h=Column("number", unit="cm"),
    d=Column("date", form="day/month/year"),
    s=Column("category", values=["Type A", "Type B"]),
    smokes=Column("yes/no", values=["no", "yes"]),
    ward=Column("group"),
)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_a_device_that_contradicts_more_than_two_thirds_is_refused_by_name(odd: Schema) -> None:
    usual = {name: profile(USUAL) for name in ("ada", "bob", "cyd", "dan")}
    together, refused = united({**usual, "aaa": profile(odd)}, None)
    assert set(refused) == {"aaa"} and set(together) == set(usual)
    assert isinstance(refused["aaa"], ShapeMismatch) and "\n" not in str(refused["aaa"]) and len(str(refused["aaa"])) < 600
    assert together["ada"].schema == USUAL
    assert united(usual, None)[0]["ada"].schema == USUAL
    seven, three = dict.fromkeys("hijklmn", profile(USUAL)), dict.fromkeys("abc", profile(odd))
    together, refused = united({**seven, **three}, None)
    assert set(refused) == set("abc") and together["h"].schema == USUAL


def test_a_conflict_without_a_majority_of_two_thirds_stops() -> None:
    usual, odd = profile(site(h=Column("number"))), profile(site(h=Column("date")))
    two_thirds, one_token = {"ada": usual, "bob": usual, "eve": odd}, dict.fromkeys(("ada", "bob", "cyd"), "one")
    lacking = dict.fromkeys("hijklm", profile(site()))
    three_of_ten = {**lacking, "ada": usual, **dict.fromkeys("efg", odd)}
    alike = {"ada": profile(site(s=Column("category", values=["A"]))), "eve": profile(site(s=Column("category", values=["a"])))}
    alike = {**lacking, **alike, "eva": alike["eve"], "evi": alike["eve"]}
    for fleet in (two_thirds, {**two_thirds, "cyd": usual, "fay": odd}, {**two_thirds, "cyd": usual}, three_of_ten, alike):
        with pytest.raises(SettingError, match=r": .*ada.* e"):
            united(fleet, None, one_token if len(fleet) == 4 else {})  # two voices only


def test_devices_of_one_token_are_one_voice_on_a_schema() -> None:
    names = ("ada", "bob", "cyd", "dan")
    usual = {name: profile(site(h=Column("number"))) for name in names}
    fakes = {f"fake{number}": profile(site(h=Column("date"))) for number in range(20)}
    tokens = {name: name for name in names} | dict.fromkeys(fakes, "stolen")
    assert set(united({**usual, **fakes}, None, tokens)[1]) == set(fakes)
    brings = dict.fromkeys(fakes, profile(schema=site(h=Column("date"))))
    together, refused = united({**usual, **brings}, None, tokens)
    assert set(refused) == set(fakes) and together["ada"].schema == site(h=Column("number"))


def test_columns_and_policies_of_one_device_bind_no_other() -> None:
    usual = {name: profile(USUAL) for name in ("ada", "bob", "cyd", "dan")}
    hostile = {
        **USUAL.columns,
        "age": Column("number", missing="refuse", range=(1e300, 1e301), unit="years"),
        "d": Column("date", form="day/month/year", origin="0001-01-01"),
    }
    together, refused = united({"aaa": profile(Schema.of(hostile)), **usual}, None)
    assert not refused and together["bob"].schema.columns["age"] == Column("number", unit="years")
    assert together["bob"].schema.columns["d"] == USUAL.columns["d"]


def test_a_proposal_that_cannot_be_is_refused_in_few_words() -> None:
    images = msgspec.structs.replace(profile(USUAL), kind="images", shape=(2, 2, 1), column_names=[])
    splits = {f"{number}{'x' * 250}": Column("split") for number in range(90)}
    wide = dict.fromkeys("vwxyz", Column("category", values=[*map(str, range(4096))]))
    for odd in (images, *(profile(Schema(of)) for of in (AGE | splits, wide, {"d": Column("date", origin="x" * 9999)}))):
        with pytest.raises(SettingError, match=r"^(?=.*eve).{9,999}$"):
            data_form.check_possible(odd, "eve")


def test_words_for_no_and_yes_are_not_chosen_by_chance() -> None:
    kiel, lund, oslo, rome = (
        site(n=Column("yes/no", values=words)) for words in (["si", "no"], ["n", "y"], ["n", "y"], ["no", "si"])
    )
    assert merge_proposals({"kiel": rome, "lund": lund, "oslo": oslo}).columns["n"].values == ["n", "y"]
    with pytest.raises(SettingError, match=r"n: .*si and no in kiel; no and si in rome"):
        merge_proposals({"kiel": kiel, "rome": rome})


def test_one_device_alone_forces_no_schema_on_tables_without_one() -> None:
    usual = {name: profile() for name in ("ada", "bob")}
    for odd in (profile(site()), profile(schema=site())):
        together, refused = united({"eve": odd, **usual}, None)
        assert set(refused) == {"eve"} and together == usual and "--schema" in str(refused["eve"])


def test_ranges_are_those_of_five_devices_or_more() -> None:
    quantiles = {"0.01": 18.0, "0.99": 90.0}
    merged = merge_proposals({"kiel": site(h=Column("number", range=(1, 2)))})
    many, few = (ColumnStatistics(devices, rows=100, quantiles=quantiles) for devices in (5, 4))
    assert with_ranges(merged, FleetStatistics(5, {}, columns={"age": many, "h": many})).columns == merged.columns | {
        "age": Column("number", range=(18.0, 90.0))
    }
    assert with_ranges(merged, FleetStatistics(5, {}, columns={"age": few})) == merged


# --- columns by which a model can tell a site are said, with the site


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
