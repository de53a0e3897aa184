"""Figures of one fleet, clear, masked and noised, against numpy on the joined tables, and errors against repetition."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attune.common.site_statistics import Centre, MaskedLayout, NoisyColumn, NoisyLayout, NoisySums
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import unit_sums
from attune.fedserver.surveys.answers import noisy_fleet
from attune.fedserver.surveys.fleet_statistics import ColumnErrors, FleetStatistics
from attune.fedserver.view.statistics_page import lines_of, write_page
from tests.fedserver.surveys.fleet import clear, gappy_shard, masked, noised

SITES, ROWS = 20, 400
WAYS = ("clear", "masked", "noised")
LABELS = ["0", "1", "2"]
RANGES = {"column 1": (0.0, 100.0), "column 2": (-4.0, 4.0)}
FORMS = {name: NoisyColumn(bounds) for name, bounds in RANGES.items()}
NOISY = NoisyLayout("fed", "example", 2.0, 1e-5, None, FORMS, LABELS)
MASKED = MaskedLayout("fed", {name: form.centre for name, form in FORMS.items()}, LABELS)


def shards(sites: int = SITES, rows: int = ROWS) -> dict[str, Shard]:
    """Return sites with age, dose and class. The numbers lie within the ranges; doses have gaps, and differ by site."""
    rng, made = np.random.default_rng(3), {}
    for number in range(sites):
        age = np.clip(rng.gamma(6.0, 8.0, ROWS), 0, 100)
        dose = np.clip(rng.normal(number / 20, 0.7, ROWS), -4, 4)
        dose[:3] = np.nan
        x, y = np.column_stack([age, dose]).astype(np.float32)[:rows], rng.integers(0, 3, ROWS)[:rows]
        made[f"d{number}"] = gappy_shard(f"d{number}", x, y, classes=[0, 1, 2])
    return made


def shown(way: str, sites: dict[str, Shard]) -> FleetStatistics:
    if way == "masked":
        return masked(sites, MASKED).statistics((), {})
    return clear(sites) if way == "clear" else noised(sites, NOISY)


def joined(sites: dict[str, Shard], place: int) -> list[npt.NDArray[np.float64]]:
    """Return the present values of a column at each site."""
    columns = [np.concatenate([site.train_x, site.test_x])[:, place].astype(np.float64) for site in sites.values()]
    return [values[~np.isnan(values)] for values in columns]


@pytest.mark.parametrize("way", WAYS)
def test_figures_agree_with_numpy_within_their_errors(way: str) -> None:
    """Without noise sums are exact and quantiles to 1 % of their distance; with it, to four of their standard errors."""
    sites = shards()
    seen, y = shown(way, sites), np.concatenate([part for site in sites.values() for part in (site.train_y, site.test_y)])
    error = 0.0 if seen.noise is None else seen.noise.error
    assert (seen.devices, seen.samples, seen.quantile_error) == (SITES, SITES * ROWS, None if way == "noised" else 0.01)
    assert seen.classes is not None and seen.classes.keys() == set(LABELS)
    for label, count in seen.classes.items():
        assert count == pytest.approx((y == int(label)).sum(), abs=4 * error)
    for place, (name, (low, high)) in enumerate(RANGES.items()):
        parts, column = joined(sites, place), seen.columns[name]
        values, errors = np.concatenate(parts), column.errors or ColumnErrors(0.0, 0.0, 0.0, 0.0)
        near = lambda true, error: pytest.approx(true, rel=1e-12, abs=4 * (error or 0.0))  # noqa: E731
        assert column.rows == near(len(values), errors.rows)
        assert column.missing == near(1 - len(values) / len(y), errors.missing)
        assert column.mean == near(values.mean(), errors.mean)
        assert column.deviation == near(values.std(), errors.deviation)
        assert column.quantiles is not None and {"0.05", "0.25", "0.5", "0.75", "0.95"} <= column.quantiles.keys()
        centre = Centre(values.mean(), values.std()) if way == "clear" else MASKED.columns[name]
        for share, value in column.quantiles.items():
            true = np.quantile(values, float(share), method="inverted_cdf")
            exact = 0.01 * abs(true - centre.mean) + 0.001 * centre.deviation
            assert value == pytest.approx(true, abs=4 * (errors.quantiles or {}).get(share, 0.0) or exact)
        assert column.histogram is not None
        edges = np.array([-np.inf, *column.histogram.edges, np.inf])
        apart = np.abs(np.histogram(values, edges)[0] - column.histogram.counts).max()
        assert len(column.histogram.counts) == len(edges) - 1 and apart < 4 * (errors.bins or len(values) / 200)
        if way == "noised":
            assert column.between is None and column.histogram.edges == pytest.approx(np.linspace(low, high, 21)[1:-1])
            continue
        assert sum(column.histogram.counts) == len(values)
        between = sum(len(part) * (part.mean() - values.mean()) ** 2 for part in parts)
        assert column.between == pytest.approx(between / np.square(values - values.mean()).sum())


def repeated(sites: dict[str, Shard], noise: float, count: int, rng: np.random.Generator) -> list[FleetStatistics]:
    """Return the figures of these sites with other noise, so often."""
    sums = {name: unit_sums(site, NOISY)[1] for name, site in sites.items()}
    drawn = lambda values: (values + noise * rng.standard_normal(len(values))).tolist()  # noqa: E731
    rows = {name: len(site.train_x) + len(site.test_x) for name, site in sites.items()}
    return [
        noisy_fleet(NOISY, {name: NoisySums(rows[name], noise, drawn(values)) for name, values in sums.items()}, {}, {})
        for _ in range(count)
    ]


def test_the_stated_errors_are_those_of_repetition() -> None:
    """300 fleets with other noise: figures spread as is stated, to 17 %, which is four standard errors of a deviation.

    Quantiles spread no more than is stated.
    """
    seen = [one.columns["column 1"] for one in repeated(shards(), 12.0, 300, np.random.default_rng(5))]
    errors: Any = seen[0].errors
    spread = lambda pick: float(np.std([pick(one) for one in seen]))  # noqa: E731
    assert errors.rows == pytest.approx(12 * math.sqrt(SITES)) and errors.bins == errors.rows
    assert spread(lambda one: one.rows) == pytest.approx(errors.rows, rel=0.17)
    assert spread(lambda one: one.mean) == pytest.approx(errors.mean, rel=0.17)
    assert spread(lambda one: one.deviation) == pytest.approx(errors.deviation, rel=0.17)
    assert spread(lambda one: one.histogram.counts[9]) == pytest.approx(errors.bins, rel=0.17)
    for share in ("0.25", "0.5", "0.75"):
        assert 0.3 * errors.quantiles[share] < spread(lambda one, at=share: one.quantiles[at]) < 1.2 * errors.quantiles[share]


def test_figures_that_drown_in_noise_are_withheld() -> None:
    [seen] = repeated(shards(5, 12), 500.0, 1, np.random.default_rng(1))
    for column in seen.columns.values():
        assert column.rows is None or column.quantiles == {}
    assert seen.classes is not None and all(count is None or count >= 10 for count in seen.classes.values())


@pytest.mark.parametrize("way", ["clear", "noised"])
def test_four_devices_are_too_few_and_nothing_is_shown(way: str) -> None:
    """A masked sum of so few is never made."""
    seen = shown(way, shards(4))
    assert seen.samples is None and seen.columns == {} and seen.classes is None
    assert "at least 5 devices and 10 rows" in seen.why


def categories() -> FleetStatistics:
    layout = NoisyLayout("fed", "group", 1.0, 1e-5, None, {"sex": NoisyColumn(values=["f", "m"])}, ["0"])
    answers = {f"d{at}": NoisySums(100, 4.0, [40.0, 59.5, 0.5, 30.0]) for at in range(6)}
    return noisy_fleet(layout, answers, {}, {"born": "it has no public range"})


def test_text_and_page_say_that_figures_are_noisy(tmp_path: Any) -> None:
    text = "\n".join(lines_of(categories()))
    assert "epsilon = 1, delta = 1e-05 for each group of samples" in text and "standard error" in text
    assert "withheld: born: it has no public range" in text
    error = 4 * math.sqrt(6)
    assert f"{'f':<7}240 ± {error:.2g}".replace(" ", "") in text.replace(" ", "") and "m357±9.8" in text.replace(" ", "")
    write_page(tmp_path, categories())
    html = (tmp_path / "index.html").read_text()
    assert "Noisy: epsilon = 1" in html and "240 ± 9.8" in html and "Values of sex" in html
