"""`standardise = "federation"`: means and deviations over all devices, from sums alone, compared by hand and with numpy."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attune
from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.plan import Columns, Profile, Scale, standardisation
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import column_sums, load_shard
from attune.fedclient.data.standardiser import Standardiser
from attune.fedserver.core.data_form import check_possible
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.scale import FAR, check_declared_sums, scales_of

SHARED = {"standardise": "federation"}


def profile(columns: Columns | None, samples: int = 2, **changed: object) -> Profile:
    return Profile(
        **{"kind": "tabular", "shape": (2,), "labels": [0], "samples": samples, "test_samples": 0, **changed}, columns=columns
    )


def test_two_devices_by_hand() -> None:
    """Use 1, 3 and 5, 7, 9: mean 5, squares 16 + 4 + 0 + 4 + 16 = 40, deviation sqrt(40 / 5). The other column is constant."""
    a, b = Columns(2, [2.0, 4.0], [2.0, 0.0]), Columns(3, [7.0, 4.0], [8.0, 0.0])
    found = scales_of({"b": profile(b), "z": profile(None), "a": profile(a)}).features
    assert found is not None
    assert (found.mean, found.std) == (pytest.approx([5.0, 4.0]), [pytest.approx(8**0.5), 1.0])
    assert scales_of({"z": profile(None)}).features is None


@pytest.mark.parametrize("liars", [1, 3])
@pytest.mark.parametrize(("mean", "square"), [(1e90, 0.0), (-1e6, 20.0), (4.0, 1e99)])
def test_some_of_ten_devices_do_not_decide_the_scale(liars: int, mean: float, square: float) -> None:
    """The mean of a column is 0 to 9 at honest sites, with a deviation of 1. The other column is 100 everywhere."""
    lie = Columns(20, [mean, 100.0], [square, 500.0])
    honest = {f"h{i}": profile(Columns(20, [float(i), 100.0], [20.0, 500.0])) for i in range(10 - liars)}
    found = scales_of(honest | {f"liar{i}": profile(lie) for i in range(liars)}).features
    expected = scales_of(honest).features
    assert found is not None and expected is not None
    assert (found.mean[0], found.std[0]) == (expected.mean[0], expected.std[0])
    assert (found.mean[1], found.std[1]) == (pytest.approx(100), pytest.approx(5))


def test_a_liar_within_the_bound_makes_the_deviation_larger_by_so_much_and_no_more() -> None:
    """Nine devices have mean 0 and deviation 1. One of ten may have mean 30 and deviation 30: sqrt(0.9 + 90 + 81)."""
    honest = {f"h{i}": profile(Columns(20, [0.0, 0.0], [20.0, 20.0])) for i in range(9)}
    lie = Columns(20, [FAR, 0.0], [20 * FAR**2, 0.0])
    found = scales_of(honest | {"liar": profile(lie)}).features
    assert found is not None and found.std[0] == pytest.approx(171.9**0.5)


def test_a_device_that_declares_many_rows_counts_as_five() -> None:
    """Nine devices have 20 rows of mean 0 and deviation 1. The tenth says 10^15 rows of 14: 100 of them count in 280."""
    honest = {f"h{i}": profile(Columns(20, [0.0, 0.0], [20.0, 20.0])) for i in range(9)}
    found = scales_of(honest | {"liar": profile(Columns(10**15, [14.0, 0.0], [0.0, 0.0]))}).features
    assert found is not None and found.mean[0] == pytest.approx(5.0)
    assert found.std[0] == pytest.approx(((9 * 20 * (1 + 25) + 100 * 81) / 280) ** 0.5)


def test_a_category_that_few_sites_have_keeps_its_scale() -> None:
    """A column is 0 at four of five sites, and 0 or 1 at the fifth: mean 0.1, deviation sqrt(0.1 - 0.01)."""
    none = {f"h{i}": profile(Columns(20, [0.0, 0.0], [0.0, 0.0])) for i in range(4)}
    found = scales_of(none | {"some": profile(Columns(20, [0.5, 0.0], [5.0, 0.0]))}).features
    assert found is not None and (found.mean[0], found.std[0]) == (pytest.approx(0.1), pytest.approx(0.3))


ROWS = st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4)), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=2), st.floats(-1e6, 1e6))
def test_it_is_what_one_who_had_all_samples_would_find(shards: list[list[tuple[float, float]]], offset: float) -> None:
    """Test also far from zero, where a difference of large squares would have no digits left."""
    parts = [np.array(rows) + offset for rows in shards]
    found = scales_of({str(i): profile(column_sums(part)) for i, part in enumerate(parts)}).features
    everything = np.concatenate(parts)
    expected = everything.std(axis=0)
    assert found is not None and found.mean == pytest.approx(everything.mean(axis=0), rel=1e-9, abs=1e-9)
    moving = expected > 1e-6
    assert np.array(found.std)[moving] == pytest.approx(expected[moving], rel=1e-6)


def test_of_series_every_step_is_a_row(write, samples) -> None:
    x, y = samples("series")
    shard = load_shard(write(x, y, test=(x[:4], y[:4]), meta=SHARED))
    columns = shard.profile().columns
    assert columns is not None and columns.rows == x.shape[0] * x.shape[1]
    assert columns.mean == pytest.approx(x.reshape(-1, 3).astype(float).mean(axis=0))


@pytest.mark.parametrize("standardise", [True, False])
def test_without_it_no_sum_leaves_the_device(write, samples, standardise: bool) -> None:
    x, y = samples("tabular")
    assert load_shard(write(x, y, meta={"standardise": standardise})).profile().columns is None


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_what_is_not_standardised_has_no_columns(write, samples, kind: str) -> None:
    x, y = samples(kind)
    assert load_shard(write(x, y, meta=SHARED | {"kind": kind})).profile().columns is None


def test_profiles_with_and_without_columns_are_read_by_old_and_new_sides() -> None:
    """Test both directions: version 1 only grows."""

    class Old(msgspec.Struct):
        kind: str
        samples: int

    sent = msgspec.json.encode(profile(Columns(2, [0.0, 0.0], [1.0, 1.0])))
    assert msgspec.json.decode(sent, type=Old).samples == 2
    known = msgspec.to_builtins(profile(None))
    del known["columns"]
    assert msgspec.convert(known, Profile).columns is None


def test_the_plans_scale_is_applied_and_without_one_the_devices_own(write, samples, plan_for) -> None:
    x, y = samples("tabular")
    shard = load_shard(write(x, y, test=(x, y), meta=SHARED))
    plan = plan_for("tabular", (5,), [0, 1])
    scale = Scale([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 4.0, 8.0, 16.0])
    ready = prepare(shard, msgspec.structs.replace(plan, scale=scale))
    assert np.array_equal(ready.test_x, ((x - scale.mean) / scale.std).astype("f4"))
    assert ready.standardiser is not None and ready.standardiser.to_dict() == {"mean": scale.mean, "std": scale.std}
    alone = prepare(shard, msgspec.structs.replace(plan, train=TrainSettings(validation=0)))
    assert alone.standardiser is not None and alone.standardiser.to_dict() == Standardiser.fit(x).to_dict()


@pytest.mark.parametrize(
    ("disclosing", "silent", "common"), [(1, 0, True), (2, 1, False), (4, 1, False), (4, 0, True), (5, 3, True)]
)
def test_a_common_scale_needs_five_devices_or_all(disclosing: int, silent: int, common: bool) -> None:
    sums = Columns(2, [2.0, 4.0], [2.0, 0.0])
    profiles = {f"a{i}": profile(sums) for i in range(disclosing)} | {f"z{i}": profile(None) for i in range(silent)}
    plan = make_plan(resolve({"method": {"name": "fedavg"}}), profiles, "f")
    assert (plan.scale is not None) is common
    words = "standardised over the federation" if common else "neither 5 devices nor all of them disclosed"
    assert words in standardisation(plan)


@pytest.mark.parametrize(
    "columns",
    [
        Columns(3, [0.0, 0.0], [1.0, 1.0]),
        Columns(2, [0.0], [1.0, 1.0]),
        Columns(2, [0.0, 0.0], [1.0, -1.0]),
        Columns(2, [0.0, 1e300], [1.0, 1.0]),
        Columns(2, [0.0, float("nan")], [1.0, 1.0]),
    ],
)
def test_sums_that_no_shard_has_are_refused(columns: Columns) -> None:
    with pytest.raises(SettingError, match="ann declares sums of columns that its shard cannot have"):
        check_possible(profile(columns), "ann")
    check_declared_sums(profile(Columns(2, [0.0, 1.0], [1.0, 0.0])), "ann")


def test_features_are_standardised_by_all_devices_or_by_one_if_it_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = {name: rng.normal(mean, 2.0, (20, 3)) for name, mean in (("a", 0.0), ("b", 50.0), ("own", 9.0))}
    for name, x in data.items():
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            np.savez(tmp_path / name / f"{part}.npz", x=x, y=np.arange(20) % 2)
        (tmp_path / name / "meta.json").write_text(json.dumps({} if name == "own" else SHARED))
    found = attune.simulate(
        [tmp_path / name for name in data], method="fedavg", model="mlr", rounds=1, settings={"train.validation": 0}
    )
    both = np.concatenate([data["a"], data["b"]])
    for name, x in {"a": both, "b": both, "own": data["own"]}.items():
        saved = found.model(name).standardiser
        assert saved is not None
        expected = Standardiser.fit(x)
        assert saved.mean == pytest.approx(expected.mean) and saved.std == pytest.approx(expected.std)
