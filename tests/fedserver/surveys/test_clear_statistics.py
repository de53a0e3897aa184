"""Statistics of a fleet, against numpy on the joined tables, and what is withheld."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from attune.common.errors import UpdateRefused
from attune.common.plan import Profile
from attune.common.site_statistics import ColumnSketch, ColumnSums, SiteSketches, SiteSums
from attune.fedclient.data.site_sums import column_sums, sketch_of
from attune.fedserver.surveys.answers import centres_of, check_sketches, check_sums, clear_fleet
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.layouts import columns_of

Table = npt.NDArray[np.float64]
PROFILE = Profile("tabular", (2,), ["no", "yes"], 30, 10, column_names=["age", "dose"])


def tables(sites: int, rows: int = 40, apart: float = 0.0) -> list[Table]:
    rng = np.random.default_rng(1)
    made = [np.c_[rng.normal(50 + apart * site, 10, rows), rng.lognormal(3, 1, rows)] for site in range(sites)]
    for table in made:
        table[:3, 1] = np.nan
    return made


def surveyed(sites: Sequence[Table], classes: Sequence[Sequence[int]] | None = None) -> FleetStatistics:
    sums = {}
    for number, table in enumerate(sites):
        counts = list(classes[number]) if classes else [len(table) // 2, len(table) - len(table) // 2]
        sums[f"d{number}"] = SiteSums(len(table), {"age": column_sums(table[:, 0]), "dose": column_sums(table[:, 1])}, counts)
    centres = centres_of(sums)
    sketches = {
        f"d{number}": SiteSketches({name: sketch_of(table[:, place], centres[name]) for place, name in enumerate(centres)})
        for number, table in enumerate(sites)
    }
    return clear_fleet(sums, sketches, dict.fromkeys(sums, PROFILE), {})


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
    three = msgspec.structs.replace(PROFILE, labels=["no", "yes", "rare"])
    sums = {f"d{number}": SiteSums(40, {}, [25, 14, 1]) for number in range(6)}
    found = clear_fleet(sums, {}, dict.fromkeys(sums, three), {})
    assert found.classes == {"no": 150, "yes": None, "rare": None}


def test_distance_of_class_shares_by_hand() -> None:
    classes = [[40, 0]] * 3 + [[0, 40]] * 3
    found = surveyed(tables(6), classes)
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


def test_columns_of_a_profile() -> None:
    assert columns_of(PROFILE) == ["age", "dose"]
    assert columns_of(msgspec.structs.replace(PROFILE, column_names=[])) == ["column 1", "column 2"]
    numbers = msgspec.structs.replace(PROFILE, task="regression", labels=["price"])
    assert columns_of(numbers) == ["age", "dose", "target price"]
    assert columns_of(Profile("images", (8, 8, 1), [0, 1], 30, 10)) == []
