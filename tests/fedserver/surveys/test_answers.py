"""Answers of a fleet's devices: what is withheld of clear ones, what is read out of a masked sum, and what is refused."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import FixedSurvivors
from attune.common.plan import Profile
from attune.common.secure.masked_sums import added, packed
from attune.common.site_statistics import BUCKETS, Centre, ColumnSketch, ColumnSums, MaskedLayout, SiteSketches, SiteSums
from attune.fedclient.data.site_sums import column_sums
from attune.fedserver.surveys.answers import KeptSum, SumReader, centres_of, check_sketches, check_sums
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from tests.fedserver.surveys.fleet import clear, gappy_shard

Table = npt.NDArray[np.float64]
PROFILE = Profile("tabular", (2,), ["no", "yes"], 30, 10, column_names=["age", "dose"])


def tables(sites: int, rows: int = 40, apart: float = 0.0) -> list[Table]:
    rng = np.random.default_rng(1)
    made = [np.c_[rng.normal(50 + apart * site, 10, rows), rng.lognormal(3, 1, rows)] for site in range(sites)]
    for table in made:
        table[:3, 1] = np.nan
    return made


def surveyed(sites: Sequence[Table], y: Sequence[Sequence[int]] = ()) -> FleetStatistics:
    """Return what is shown of these tables, half of whose rows are of each class, unless `y` says otherwise."""
    made, facts = {}, {"columns": ["age", "dose"], "classes": [0, 1, 2]}
    for number, x in enumerate(sites):
        made[f"d{number}"] = gappy_shard(f"d{number}", x, np.array(y[number] if y else np.arange(len(x)) % 2), **facts)
    return clear(made)


def test_a_column_that_four_of_six_sites_have_is_withheld() -> None:
    sites = tables(6)
    for table in sites[:2]:
        table[:, 1] = np.nan
    dose = surveyed(sites).columns["dose"]
    assert dose.devices == 4
    rest = msgspec.structs.replace(dose, devices=0)
    assert all(value is None for name, value in msgspec.structs.asdict(rest).items() if name != "devices")


def test_quantiles_beyond_which_too_few_rows_lie_are_withheld() -> None:
    age = surveyed(tables(5, rows=20)).columns["age"]
    assert age.quantiles is not None and set(age.quantiles) == {"0.25", "0.5", "0.75"}


def test_each_bin_of_a_histogram_has_enough_rows_and_devices() -> None:
    sites = tables(6)
    sites[0][:, 0] += 1000  # one site alone is far away
    histogram = surveyed(sites).columns["age"].histogram
    assert histogram is not None and len(histogram.counts) == 1, "the five others and it are only shown together"


def test_rare_classes_are_withheld_and_do_not_follow_from_the_rest() -> None:
    found = surveyed(tables(6), [[0] * 25 + [1] * 14 + [2]] * 6)
    assert found.classes == {"0": 150, "1": None, "2": None}


def test_distance_of_class_shares_by_hand() -> None:
    found = surveyed(tables(6), [[0] * 40] * 3 + [[1] * 40] * 3)
    assert found.class_distance == pytest.approx(0.5) and found.first == ["fedper", "fedtp"]
    assert surveyed(tables(6)).first == ["fedavg"]
    assert surveyed(tables(6, apart=20.0)).first == ["fedmcsa", "fedtp"]


@pytest.mark.parametrize(
    "sums",
    [
        SiteSums(41, {}, [20, 20]),
        SiteSums(40, {"height": ColumnSums(40, 0, 0.0, 1.0)}, [20, 20]),
        SiteSums(40, {"age": ColumnSums(41, 0, 0.0, 1.0)}, [20, 20]),
        SiteSums(40, {"age": ColumnSums(40, 0, 1e200, 1.0)}, [20, 20]),
        SiteSums(40, {"age": ColumnSums(40, 0, 0.0, float("nan"))}, [20, 20]),
        SiteSums(40, {}, [20, 20, 20]),
        SiteSums(40, {}, [30, 20]),
    ],
)
def test_sums_that_the_declared_data_cannot_have_are_refused(sums: SiteSums) -> None:
    with pytest.raises(UpdateRefused, match="not those of the data"):
        check_sums(sums, PROFILE)


@pytest.mark.parametrize(
    "sketch", [ColumnSketch(0, [39]), ColumnSketch(-9999, [40]), ColumnSketch(1030, [1] * 40), ColumnSketch(0, [])]
)
def test_sketches_that_do_not_fit_to_the_sums_are_refused(sketch: ColumnSketch) -> None:
    sums = SiteSums(40, {"age": column_sums(tables(1)[0][:, 0])}, [20, 20])
    centres = centres_of({f"d{number}": sums for number in range(5)})
    with pytest.raises(UpdateRefused, match="not those of the data"):
        check_sketches(SiteSketches({"age": sketch}), sums, centres)


def kept(layout: MaskedLayout, *sites: list[int | float]) -> KeptSum:
    number = bytes(layout.size)
    for slots in sites:
        number = added(number, packed(layout, slots))
    names = tuple(f"d{place}" for place in range(len(sites)))
    return KeptSum("1", layout, FixedSurvivors(3, (), names, names), number, is_masked=False)


def site(values: list[float], missing: int = 0, **wrong: float) -> list[int | float]:
    """Return the slots of one column with whole numbers, worked out by hand: the buckets 1, 2, ... hold one value each."""
    buckets = [0] * (2 * BUCKETS + 1)
    for place in range(len(values)):
        buckets[BUCKETS + 1 + place] = 1
    total = sum(values)
    column = [wrong.get("rows", len(values)), missing, total, sum(value**2 for value in values), total * total / len(values)]
    return [len(values) + missing, *column, *buckets, 0, 0]


LAYOUT = MaskedLayout("fed", {"age": Centre(0.0, 1.0)})


def test_moments_are_read_out_by_hand() -> None:
    report = SumReader(kept(LAYOUT, site([1, 2, 3, 6], 1), site([4, 8, 0, 0, 0, 0], 4))).statistics((), {})
    column = report.columns["age"]
    # Ten values with the sum 24 and the squares 50 and 80; sites with the sums 12 of 4 and 12 of 6.
    assert (report.devices, report.samples, column.rows, column.missing) == (2, 15, 10, 5 / 15)
    assert column.mean == 2.4 and column.deviation == pytest.approx((13.0 - 2.4**2) ** 0.5, rel=1e-15)
    assert column.between == pytest.approx((36 + 24 - 57.6) / (130 - 57.6), rel=1e-15)


def test_fewer_than_ten_rows_are_withheld() -> None:
    report = SumReader(kept(LAYOUT, site([1, 2, 3], 3), site([4, 8], 3))).statistics((), {})
    assert report.columns["age"].rows is None and report.columns["age"].mean is None


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_counts_that_do_not_fit_together_are_no_sum(rows: int) -> None:
    with pytest.raises(UpdateRefused, match="is no sum of statistics"):
        SumReader(kept(LAYOUT, site([1, 2, 3], rows=rows), site([4, 8])))


def test_a_scale_needs_rows_and_a_constant_column_has_the_deviation_1() -> None:
    layout = MaskedLayout("fed", features=["x"], targets=["y"])
    scales = SumReader(kept(layout, [3, 3, 6.0, 12.0, 3, 0.0, 6.0], [1, 1, 2.0, 4.0, 3, 6.0, 12.0])).scales
    assert scales.features is not None and (scales.features.mean, scales.features.std) == ([2.0], [1.0])
    assert scales.targets is not None and (scales.targets.mean, scales.targets.std) == ([1.0], [pytest.approx(2**0.5)])
    with pytest.raises(UpdateRefused, match="is no sum"):
        SumReader(kept(layout, [3, 0, 6.0, 12.0, 3, 0.0, 6.0]))


def test_a_kept_sum_can_be_read_back() -> None:
    whole = kept(LAYOUT, site([1, 2]))
    assert msgspec.json.decode(msgspec.json.encode(whole), type=KeptSum) == whole
