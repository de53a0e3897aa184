"""Figures of a fleet whose devices add noise, against numpy on the joined tables, and their errors against repetition."""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Column, Schema
from attune.common.site_statistics import NoisyColumn, NoisyLayout, NoisySums
from attune.fedserver.surveys.answers import noisy_fleet
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.layouts import Asks, noisy_layout
from attune.fedserver.view.statistics_page import lines_of, write_page

SITES, ROWS = 20, 400
Table = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
LAYOUT = NoisyLayout(
    "fed", "example", 2.0, 1e-5, None, {"age": NoisyColumn((0, 100)), "dose": NoisyColumn((-4, 4))}, ["0", "1", "2"]
)
SCHEMA = Schema.of(
    {
        "age": Column("number", range=(0.0, 100.0)),
        "born": Column("date"),
        "sex": Column("category", values=["f", "m"]),
        "ill": Column("label"),
    }
)


NAMED = msgspec.structs.replace(LAYOUT, columns={"column 1": LAYOUT.columns["age"], "column 2": LAYOUT.columns["dose"]})


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


def shown() -> FleetStatistics:
    layout = NoisyLayout("fed", "group", 1.0, 1e-5, None, {"sex": NoisyColumn(values=["f", "m"])}, ["0"])
    answers = {f"d{at}": NoisySums(100, 4.0, [40.0, 59.5, 0.5, 30.0]) for at in range(6)}
    return noisy_fleet(layout, answers, {}, {"born": "it has no public range"})


def test_text_and_page_say_that_figures_are_noisy(tmp_path: Any) -> None:
    text = "\n".join(lines_of(shown()))
    assert "epsilon = 1, delta = 1e-05 for each group of samples" in text and "standard error" in text
    assert "withheld: born: it has no public range" in text
    error = 4 * math.sqrt(6)
    assert f"{'f':<7}240 ± {error:.2g}".replace(" ", "") in text.replace(" ", "") and "m357±9.8" in text.replace(" ", "")
    write_page(tmp_path, shown())
    html = (tmp_path / "index.html").read_text()
    assert "Noisy: epsilon = 1" in html and "240 ± 9.8" in html and "Values of sex" in html
