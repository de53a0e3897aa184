"""Figures of a fleet whose devices add noise, against numpy on the joined tables, and their errors against repetition."""

import math
from collections.abc import Mapping, Sequence
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
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.site_sums import unit_sums
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.private_learning import released
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


def tables() -> list[Table]:
    """Return (age and dose, class) of 20 sites. The numbers lie within the ranges."""
    rng, sites = np.random.default_rng(3), []
    for number in range(SITES):
        age = np.clip(rng.gamma(6.0, 8.0, ROWS), 0, 100)
        dose = np.clip(rng.normal(number / 20, 0.7, ROWS), -4, 4)
        sites.append((np.column_stack([age, dose]).astype(np.float32), rng.integers(0, 3, ROWS)))
    return sites


NAMED = msgspec.structs.replace(LAYOUT, columns={"column 1": LAYOUT.columns["age"], "column 2": LAYOUT.columns["dose"]})


def sums_of(site: Table, rows: int = ROWS) -> npt.NDArray[np.float64]:
    return unit_sums(shard_of("site", (site[0][:rows], site[1][:rows])).load(), NAMED)[1]


def answers_of(sums: Sequence[npt.NDArray[np.float64]], noise: float, rng: np.random.Generator) -> Mapping[str, NoisySums]:
    return {
        f"d{at}": NoisySums(ROWS, noise, (values + noise * rng.standard_normal(len(values))).tolist())
        for at, values in enumerate(sums)
    }


def test_the_figures_agree_with_numpy_within_their_errors() -> None:
    """Twenty devices with real releases: each figure is within four of its standard errors."""
    pytest.importorskip("dp_accounting")
    sites = tables()
    answers = {
        f"d{at}": released(shard_of("site", site).load(), NAMED, PrivacyLedger.in_memory(bytes([at]) * 32), None)
        for at, site in enumerate(sites)
    }
    x, y = np.concatenate([site[0] for site in sites]).astype(np.float64), np.concatenate([site[1] for site in sites])
    seen = noisy_fleet(LAYOUT, answers, {}, {})
    assert seen.devices == SITES and seen.samples == len(x) and seen.noise is not None and seen.quantile_error is None
    for name, values in (("age", x[:, 0]), ("dose", x[:, 1])):
        column = seen.columns[name]
        errors = column.errors
        assert errors is not None and errors.mean and errors.deviation and errors.quantiles and column.quantiles
        assert column.rows == pytest.approx(len(values), abs=4 * errors.rows)
        assert column.missing == pytest.approx(0, abs=4 * errors.missing)
        assert column.mean == pytest.approx(values.mean(), abs=4 * errors.mean)
        assert column.deviation == pytest.approx(values.std(), abs=4 * errors.deviation)
        assert {"0.05", "0.25", "0.5", "0.75", "0.95"} <= column.quantiles.keys()
        for share, value in column.quantiles.items():
            assert value == pytest.approx(np.quantile(values, float(share)), abs=4 * errors.quantiles[share])
        low, high = LAYOUT.columns[name].range or (0, 1)
        true, edges = np.histogram(values, 20, (low, high))
        assert column.histogram is not None and errors.bins is not None
        assert column.histogram.edges == pytest.approx(edges[1:-1])
        assert np.abs(np.array(column.histogram.counts) - true).max() < 4 * errors.bins
    for label, count in (seen.classes or {}).items():
        assert count == pytest.approx((y == int(label)).sum(), abs=4 * seen.noise.error)


def test_the_stated_errors_are_those_of_repetition() -> None:
    """300 fleets with other noise: figures spread as is stated, to 17 %, which is four standard errors of a deviation.

    Quantiles spread no more than is stated.
    """
    sums, rng = [sums_of(site) for site in tables()], np.random.default_rng(5)
    seen = [noisy_fleet(LAYOUT, answers_of(sums, 12.0, rng), {}, {}).columns["age"] for _ in range(300)]
    errors = seen[0].errors
    assert errors is not None and errors.quantiles is not None and errors.mean and errors.deviation and errors.bins
    spread = lambda pick: float(np.std([pick(one) for one in seen]))  # noqa: E731
    assert errors.rows == pytest.approx(12 * math.sqrt(SITES)) and errors.bins == errors.rows
    assert spread(lambda one: one.rows) == pytest.approx(errors.rows, rel=0.17)
    assert spread(lambda one: one.mean) == pytest.approx(errors.mean, rel=0.17)
    assert spread(lambda one: one.deviation) == pytest.approx(errors.deviation, rel=0.17)
    assert spread(lambda one: one.histogram.counts[9]) == pytest.approx(errors.bins, rel=0.17)
    for share in ("0.25", "0.5", "0.75"):
        assert 0.3 * errors.quantiles[share] < spread(lambda one, at=share: one.quantiles[at]) < 1.2 * errors.quantiles[share]


def test_figures_that_drown_in_noise_are_withheld() -> None:
    sums = [sums_of(site, 12) for site in tables()[:5]]
    seen = noisy_fleet(LAYOUT, answers_of(sums, 500.0, np.random.default_rng(1)), {}, {})
    for column in seen.columns.values():
        assert column.rows is None or column.quantiles == {}
    assert seen.classes is not None and all(count is None or count >= 10 for count in seen.classes.values())


def test_fewer_than_five_devices_show_nothing() -> None:
    sums = [sums_of(site) for site in tables()[:4]]
    seen = noisy_fleet(LAYOUT, answers_of(sums, 1.0, np.random.default_rng(1)), {"d9": "no"}, {"born": "no range"})
    assert seen.columns == {} and seen.samples is None and "at least 5 devices" in seen.why
    assert seen.without == {"d9": "no"} and seen.withheld == {"born": "no range"}


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
