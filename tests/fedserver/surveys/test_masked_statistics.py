"""The layout of a masked sum, by what devices declare, and what is read out of a sum."""

from typing import Any

import msgspec
import pytest

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.messages import FixedSurvivors
from attune.common.plan import DataSettings, Profile
from attune.common.schema import Column, Schema
from attune.common.secure.masked_sums import added, packed
from attune.common.site_statistics import BUCKETS, Centre, MaskedLayout
from attune.fedserver.surveys.answers import KeptSum, SumReader
from attune.fedserver.surveys.layouts import Asks, masked_layout

ASKS = Asks("fed", PrivacySettings(), DataSettings())
SCHEMA = Schema.of({"age": Column("number", range=(0.0, 100.0)), "dose": Column("number"), "ill": Column("label")})


def profile(**said: Any) -> Profile:
    usual: dict[str, Any] = {"column_names": ["age", "dose"], "shape": (2,)} | said
    return Profile("tabular", labels=usual.pop("labels", ["no", "yes"]), samples=30, test_samples=10, **usual)


def test_a_layout_has_what_all_devices_have() -> None:
    layout, without = masked_layout(ASKS, {"a": profile(schema=SCHEMA), "b": profile(schema=SCHEMA)}, ())
    assert layout == MaskedLayout("fed", {"age": Centre(50.0, 25.0), "dose": Centre(0.0, 1.0)}, ["no", "yes"], ["age", "dose"])
    assert without == {}


def test_devices_that_differ_leave_their_slots_or_the_sum() -> None:
    odd = profile(column_names=["age"], shape=(1,), labels=["yes"])
    layout, without = masked_layout(ASKS, {"a": profile(), "b": profile(), "c": odd}, ())
    assert without == {"c": "it has no column 'dose' of the masked sum"}
    assert layout.classes == ["no", "yes"] and layout.features == ["age", "dose"]
    layout, without = masked_layout(ASKS, {"a": profile(), "b": profile(), "c": odd}, ["age"])
    assert without == {} and layout.columns.keys() == {"age"}
    assert layout.classes == [], "from the number of samples, which is public, the count of the one class would follow"
    assert layout.features == []


def test_targets_and_too_many_columns() -> None:
    layout, _ = masked_layout(ASKS, {"a": profile(task="regression", labels=["cost"])}, ())
    assert (layout.targets, layout.classes, list(layout.columns)) == (["cost"], [], ["age", "dose", "target cost"])
    wide = profile(shape=(257,), column_names=[])
    with pytest.raises(SettingError, match="ask for at most 256"):
        masked_layout(ASKS, {"a": wide}, ())


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
