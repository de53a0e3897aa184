"""Layouts of masked and of noised statistics, by what devices declare."""

from typing import Any

import msgspec
import pytest

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Column, Schema
from attune.common.site_statistics import Centre, MaskedLayout, NoisyColumn
from attune.fedserver.surveys.layouts import Asks, columns_of, masked_layout, noisy_layout

ASKS = Asks("fed", PrivacySettings(), DataSettings())
RANGED = Schema.of({"age": Column("number", range=(0.0, 100.0)), "dose": Column("number"), "ill": Column("label")})
SCHEMA = Schema.of(
    {
        "age": Column("number", range=(0.0, 100.0)),
        "born": Column("date"),
        "sex": Column("category", values=["f", "m"]),
        "ill": Column("label"),
    }
)


def sited(**said: Any) -> Profile:
    usual: dict[str, Any] = {"column_names": ["age", "dose"], "shape": (2,)} | said
    return Profile("tabular", labels=usual.pop("labels", ["no", "yes"]), samples=30, test_samples=10, **usual)


def test_a_layout_has_what_all_devices_have() -> None:
    layout, without = masked_layout(ASKS, {"a": sited(schema=RANGED), "b": sited(schema=RANGED)}, ())
    assert layout == MaskedLayout("fed", {"age": Centre(50.0, 25.0), "dose": Centre(0.0, 1.0)}, ["no", "yes"], ["age", "dose"])
    assert without == {}


def test_devices_that_differ_leave_their_slots_or_the_sum() -> None:
    odd = sited(column_names=["age"], shape=(1,), labels=["yes"])
    layout, without = masked_layout(ASKS, {"a": sited(), "b": sited(), "c": odd}, ())
    assert without == {"c": "it has no column 'dose' of the masked sum"}
    assert layout.classes == ["no", "yes"] and layout.features == ["age", "dose"]
    layout, without = masked_layout(ASKS, {"a": sited(), "b": sited(), "c": odd}, ["age"])
    assert without == {} and layout.columns.keys() == {"age"}
    assert layout.classes == [], "from the number of samples, which is public, the count of the one class would follow"
    assert layout.features == []


def test_targets_and_too_many_columns() -> None:
    layout, _ = masked_layout(ASKS, {"a": sited(task="regression", labels=["cost"])}, ())
    assert (layout.targets, layout.classes, list(layout.columns)) == (["cost"], [], ["age", "dose", "target cost"])
    wide = sited(shape=(257,), column_names=[])
    with pytest.raises(SettingError, match="ask for at most 256"):
        masked_layout(ASKS, {"a": wide}, ())


def questions(schema: Schema | None, classes: list[Any] | None = None, **privacy: Any) -> Asks:
    asked = PrivacySettings(unit="example", epsilon=4.0, statistics_epsilon=1.0, **privacy)
    return Asks("fed", asked, DataSettings(columns=dict(schema.columns) if schema else {}, classes=classes or []))


def profile(schema: Any = msgspec.UNSET, **said: Any) -> Profile:
    names = schema.feature_names if isinstance(schema, Schema) else ["age", "dose"]
    return Profile("tabular", (len(names),), [0, 1], 10, 2, column_names=names, schema=schema, **said)


@pytest.mark.parametrize("declared", ["by the operator", "by the devices"])
def test_the_layout_is_what_the_schema_declares(declared: str) -> None:
    asks = questions(SCHEMA if declared == "by the operator" else None, ["no", "yes"])
    layout, withheld = noisy_layout(asks, {"a": profile(SCHEMA), "b": profile(SCHEMA)}, [])
    assert layout.columns == {"age": NoisyColumn((0.0, 100.0)), "sex": NoisyColumn(values=["f", "m"])}
    assert (layout.classes, layout.epsilon, layout.budget) == (["no", "yes"], 1.0, 4.0)
    assert "range" in withheld["born"] and "differences between sites" in withheld and "ill" not in withheld
    assert (
        noisy_layout(asks, {"b": profile(SCHEMA)}, [])[0] == layout
    )  # other devices: the question is the same, and costs nothing
    assert list(noisy_layout(asks, {"b": profile(SCHEMA)}, ["sex"])[0].columns) == ["sex"]
    for column in ("born", "height"):
        with pytest.raises(SettingError, match=f"'{column}' has no noisy statistics"):
            noisy_layout(asks, {"a": profile(SCHEMA)}, [column])


def test_without_a_schema_the_ranges_of_the_settings_count() -> None:
    asks = questions(None, ranges=[(0.0, 9.0)])
    layout, withheld = noisy_layout(asks, {"a": profile(), "b": profile()}, [])
    assert layout.columns == {"age": NoisyColumn((0.0, 9.0)), "dose": NoisyColumn((0.0, 9.0))}
    assert layout.classes == [] and "data.classes" in withheld["classes"]
    with pytest.raises(SettingError, match="has 3 ranges, and the data have 2 columns"):
        noisy_layout(questions(None, ranges=[(0.0, 9.0)] * 3), {"a": profile()}, [])
    with pytest.raises(SettingError, match="nothing to ask for with noise"):
        noisy_layout(questions(None), {"a": profile(), "b": profile()}, [])


def test_targets_have_ranges_of_their_own() -> None:
    scored = Profile("tabular", (2,), ["pain"], 10, 2, column_names=["age", "dose"], task="regression")
    layout, withheld = noisy_layout(questions(None, target_ranges=[(0.0, 10.0)]), {"a": scored, "b": scored}, [])
    assert layout.columns == {"target pain": NoisyColumn((0.0, 10.0))} and layout.classes == []
    assert {"age", "dose"} <= withheld.keys()


PROFILE = Profile("tabular", (2,), ["no", "yes"], 30, 10, column_names=["age", "dose"])


def test_columns_of_a_profile() -> None:
    assert columns_of(PROFILE) == ["age", "dose"]
    assert columns_of(msgspec.structs.replace(PROFILE, column_names=[])) == ["column 1", "column 2"]
    numbers = msgspec.structs.replace(PROFILE, task="regression", labels=["price"])
    assert columns_of(numbers) == ["age", "dose", "target price"]
    assert columns_of(Profile("images", (8, 8, 1), [0, 1], 30, 10)) == []
