"""Survival of a fleet: by hand, against lifelines on the joined tables, and what is withheld."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.config import PrivacySettings
from attune.common.errors import UpdateRefused
from attune.common.plan import DataSettings
from attune.common.site_statistics import Centre, ColumnSketch, SiteSketches, bucket_value
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import site_sketches, site_sums, sketch_of
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.surveys.answers import check_sketches
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.kaplan_meier import KaplanMeier, kaplan_meier
from attune.fedserver.surveys.layouts import Asks, masked_layout, noisy_layout, survival_columns
from attune.fedserver.view.statistics_page import lines_of, write_page
from tests.fedserver.surveys.fleet import clear, masked

SURVIVAL = ReadOptions.of(task="survival")
Rows = npt.NDArray[np.float64]  # (N, 2): times and events


def cohort(site: int, rows: int = 60) -> Rows:
    rng = np.random.default_rng(site)
    time, censored = rng.exponential(20 + site, rows), rng.uniform(5, 60, rows)
    return np.c_[np.round(np.minimum(time, censored), 1), time <= censored]


def shards_of(sites: Sequence[Rows]) -> dict[str, Shard]:
    x = np.zeros((1000, 1))
    return {f"d{n}": shard_of(f"d{n}", (x[: len(y)], y), SURVIVAL).load() for n, y in enumerate(sites)}


def surveyed(sites: Sequence[Rows]) -> FleetStatistics:
    return clear(shards_of(sites))


def bounds(joined: Rows, found: KaplanMeier, error: Sequence[float]) -> list[tuple[float, float]]:
    """Return lifelines' survival a bucket later and a bucket earlier than each end."""
    fitted = pytest.importorskip("lifelines").KaplanMeierFitter().fit(*joined.T)
    ends = np.array(found.times)
    return list(zip(fitted.predict(ends + error), fitted.predict(ends - error), strict=True))


def test_survival_by_hand() -> None:
    """Expect 60 of 80 to survive 1; then 20 leave at 2, and of 40 at risk 20 do not survive 3."""
    y = np.repeat([[1.0, 1], [2, 0], [3, 1], [4, 0]], 4, axis=0)
    centre = Centre(2.5, 1.0)
    times = [sketch_of(y[:, 0], centre)] * 5
    events = [sketch_of(y[y[:, 1] > 0, 0], centre)] * 5
    found = kaplan_meier(times, events, centre, 5)
    assert found is not None and found.times == pytest.approx([1, 3], abs=0.02)
    assert (found.at_risk, found.events, found.survival) == ([80, 60], [20, 20], [0.75, 0.375])
    assert kaplan_meier(times, events, centre, 6) is None
    one_later = [sketch_of(np.array([1.0] * 4 + [3.0] * (device == 0)), centre) for device in range(5)]
    all_at_1 = [sketch_of(np.full(4, 1.0), centre)] * 5
    assert kaplan_meier(one_later, all_at_1, centre, 5) is None, "one row would follow from 21 at risk and 20 events"
    early = [sketch_of(np.full(4, 0.001), Centre(9.2, 9.0))] * 5
    assert (first := kaplan_meier(early, early, Centre(9.2, 9.0), 5)) is not None and 0 <= first.times[0] < 0.1
    whole = kaplan_meier(all_at_1, all_at_1, centre, 5)
    assert whole is not None and (whole.at_risk, whole.events, whole.survival) == ([20], [20], [0.0])


def test_twenty_devices_agree_with_lifelines_on_the_joined_tables() -> None:
    lifelines = pytest.importorskip("lifelines")
    sites = [cohort(site) for site in range(20)]
    joined = np.concatenate(sites)
    report = surveyed(sites)
    found, times = report.survival, report.columns["time time"]
    assert found is not None and times.mean and times.deviation and len(found.times) > 10
    centre = Centre(times.mean, times.deviation)
    assert (report.columns["time time"].rows, report.columns["event event"].rows) == (1200, joined[:, 1].sum())
    happened = joined[joined[:, 1] > 0, 0]
    assert report.columns["event event"].mean == pytest.approx(happened.mean(), rel=1e-12)
    assert report.columns["event event"].deviation == pytest.approx(happened.std(), rel=1e-12)

    def bucket_of(time: float) -> float:
        return bucket_value(sketch_of(np.array([time]), centre).first, centre)

    rounded = joined.copy()
    rounded[:, 0] = [bucket_of(time) for time in joined[:, 0]]
    exact = lifelines.KaplanMeierFitter().fit(*rounded.T)
    assert found.survival == pytest.approx(exact.predict(found.times).to_list(), rel=1e-12)
    begins = [-np.inf, *found.times[:-1]]
    assert found.at_risk == [int((rounded[:, 0] > begin).sum()) for begin in begins]
    inside = [(rounded[:, 0] > begin) & (rounded[:, 0] <= end) for begin, end in zip(begins, found.times, strict=True)]
    assert found.events == [int(rounded[rows, 1].sum()) for rows in inside]
    error = 0.01 * np.abs(np.array(found.times) - centre.mean) + 1e-3 * centre.deviation
    for value, (later, earlier) in zip(found.survival, bounds(joined, found, error), strict=True):
        assert later - 1e-12 <= value <= earlier + 1e-12


def test_what_too_few_devices_or_rows_stand_behind_is_withheld() -> None:
    assert surveyed([cohort(site) for site in range(4)]).survival is None
    sites = [cohort(site) for site in range(6)]
    for site in sites[:2]:
        site[:, 1] = 0
    assert surveyed(sites).survival is None, "events on four devices"
    sites = [cohort(site) for site in range(6)]
    for number, site in enumerate(sites):
        site[:, 1] = 0
        site[: 1 + (number < 3), 1] = 1
    assert surveyed(sites).survival is None, "nine events"
    shards = shards_of([cohort(site) for site in range(2)])
    profiles = [shards["d0"].profile(), msgspec.structs.replace(shards["d1"].profile(), labels=["weeks", "died"])]
    assert survival_columns(profiles) == [] and survival_columns(profiles[1:]) == ["time weeks", "event died"]


SITES = st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=14), min_size=4, max_size=8)


@given(SITES, st.integers(1, 3))
def test_each_count_that_follows_has_enough_devices_and_rows(sites: list[list[tuple[int, int]]], repeat: int) -> None:
    tables = [np.repeat(np.array(site, dtype=np.float64), repeat, axis=0) for site in sites]
    centre = Centre(3.0, 2.0)
    events = [sketch_of(table[table[:, 1] > 0, 0], centre) for table in tables]
    found = kaplan_meier([sketch_of(table[:, 0], centre) for table in tables], events, centre, 5)
    if found is None:
        return
    edges = [-1.0, *(round(time) for time in found.times)]
    for place, (begin, end) in enumerate(itertools.pairwise(edges)):
        inside = [table[(table[:, 0] > begin) & (table[:, 0] <= end)] for table in tables]
        died, left = ([int((rows[:, 1] == event).sum()) for rows in inside] for event in (1, 0))
        after = [int((table[:, 0] > end).sum()) for table in tables]
        assert sum(died) == found.events[place] >= 10 and sum(count > 0 for count in died) >= 5
        for counts in (left, after):
            assert sum(counts) == 0 or (sum(counts) >= 10 and sum(count > 0 for count in counts) >= 5)
    assert found.survival == sorted(found.survival, reverse=True) and 0 <= found.survival[-1] <= found.survival[0] < 1


def test_a_device_that_counts_more_events_than_rows_is_refused() -> None:
    shard = shards_of([cohort(0)])["d0"]
    sums, pair = site_sums(shard), ["time time", "event event"]
    centres = dict.fromkeys(pair, Centre(20.0, 15.0))
    sketches = site_sketches(shard, centres)
    check_sketches(sketches, sums, centres, pair)
    events = sketches.columns["event event"]
    moved = msgspec.structs.replace(events, first=events.first + 40)
    for lie in ({**sketches.columns, "event event": moved}, {"event event": events}):
        with pytest.raises(UpdateRefused, match="it counts more events than rows at a time"):
            check_sketches(SiteSketches(lie), sums, centres, pair)


def test_a_masked_sum_has_the_same_survival_by_the_rules_of_its_histograms() -> None:
    sites = [cohort(site) for site in range(6)]
    shards = shards_of(sites)
    layout, without = masked_layout(
        Asks("fed", PrivacySettings(), DataSettings()), {name: shard.profile() for name, shard in shards.items()}, ()
    )
    assert without == {} and list(layout.columns) == ["column 1", "time time", "event event"]
    assert layout.features == ["column 1"] and layout.targets == []
    reader = masked(shards, layout)
    found = reader.statistics((), {}).survival
    assert found is not None and min(found.events) >= 10
    for value, (later, earlier) in zip(
        found.survival, bounds(np.concatenate(sites), found, 0.01 * np.array(found.times) + 1e-3), strict=True
    ):
        assert later - 1e-12 <= value <= earlier + 1e-12
    assert reader.statistics(["column 1"], {}).survival is None, "only what is asked for"


def test_noise_on_the_devices_names_survival_as_withheld() -> None:
    profile = shards_of([cohort(0)])["d0"].profile()
    privacy = PrivacySettings(unit="example", noise=1.0, statistics_epsilon=1.0, ranges=[(0.0, 1.0)])
    layout, withheld = noisy_layout(Asks("fed", privacy, DataSettings()), {"a": profile}, ())
    assert list(layout.columns) == ["column 1"] and "survival cannot be trained with noise" in withheld["survival"]


def test_the_page_has_a_table_and_a_picture(tmp_path) -> None:
    report = surveyed([cohort(site) for site in range(6)])
    text = "\n".join(lines_of(report))
    assert "at risk" in text and "360" in text
    written = [path.name for path in write_page(tmp_path, report)]
    assert "survival.png" in written and "Kaplan and Meier" in (tmp_path / "index.html").read_text()
    again = msgspec.json.decode(msgspec.json.encode(report), type=FleetStatistics)
    assert again.survival == report.survival and isinstance(again.survival, KaplanMeier)


def test_sketches_of_nothing() -> None:
    nothing = ColumnSketch(0, [])
    assert (
        kaplan_meier([nothing] * 5, [nothing] * 5, Centre(0.0, 1.0), 5) is None
        and kaplan_meier([], [], Centre(0, 1), 5) is None
    )
