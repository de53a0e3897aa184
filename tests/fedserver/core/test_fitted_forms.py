"""Devices whose samples have other sizes or channels, where the operator lets them be fitted, and where not."""

import math

import msgspec
import pytest

from attune.common.errors import ShapeMismatch
from attune.common.given_model import GivenModel
from attune.common.plan import Columns, DataSettings, Profile, Scale
from attune.fedserver.core.data_form import agree, check_declared, check_fits, check_possible, fitted
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.scale import scales_of
from attune.fedserver.surveys.layouts import columns_of

RGB = ["red", "green", "blue"]
USUAL: dict[str, object] = {"method": {"name": "fedavg"}}


def images(*shape: int, names: list[str] | None = None) -> Profile:
    return Profile("images", shape, [0, 1], 30, 10, column_names=names or [])


def series(steps: int, names: str, columns: Columns | None = None) -> Profile:
    return Profile("series", (steps, len(names)), [0, 1], 2, 0, columns=columns, column_names=list(names))


def test_devices_of_other_sizes_agree_by_the_setting_and_are_told_of_it_without() -> None:
    profiles = {"kiel": images(8, 8, 3), "lund": images(12, 9, 1), "oslo": images(5, 5, 4)}
    agreement = agree(profiles, form=DataSettings(fit=True, shape=[8, 8, 3]))
    assert {profile.shape for profile in agreement.agreed.values()} == {(8, 8, 3)} and not agreement.odd
    assert "no majority" in agree(profiles).tie
    with pytest.raises(ShapeMismatch, match=r"Images and series can be fitted to data.shape \(data.fit\)"):
        check_declared(profiles["lund"], DataSettings(shape=[8, 8, 3]), "lund")
    plan = make_plan(resolve(USUAL | {"data": {"fit": True, "shape": [8, 8, 3]}}), agreement.agreed, "f")
    assert (plan.model.shape, plan.model.channels, plan.column_names) == ((8, 8, 3), RGB, RGB)
    for profile in profiles.values():
        check_fits(profile, plan, "a device")
    assert resolve(GivenModel(plan.model, [0, 1], column_names=RGB).settings("")).data.channels == RGB, "fedserver evaluate"
    with pytest.raises(ShapeMismatch, match="holds images of shape \\(8, 8, 2\\)"):
        check_fits(images(8, 8, 2), plan, "riga")
    assert "channels" not in msgspec.to_builtins(make_plan(resolve(USUAL), {"kiel": profiles["kiel"]}, "f"))["model"]


def test_tables_are_never_fitted_and_channels_of_images_may_have_names() -> None:
    table, form = Profile("tabular", (3,), [0, 1], 30, 10), DataSettings(fit=True, shape=[8, 3])
    assert fitted(table, form) == table
    check_possible(named := images(8, 8, 2, names=["t1", "flair"]), "kiel")
    assert columns_of(named) == [], "nobody is asked for statistics of pixels"


def test_a_common_scale_is_of_each_channel_over_the_devices_that_have_it() -> None:
    """Channel a has 1, 3 (mean 2, squares 2) and 7, 9 (8, 2): mean 5, squares 2 + 2 + 36. Only the first device has b."""
    form = DataSettings(fit=True, shape=[2, 2], columns=["a", "b"])
    one = fitted(series(1, "ba", Columns(2, [4.0, 2.0], [8.0, 2.0])), form)
    two = fitted(series(1, "az", Columns(2, [8.0, 0.0], [2.0, 0.0])), form)
    assert one.columns == Columns(2, [2.0, 4.0], [2.0, 8.0]) and two.columns is not None and math.isnan(two.columns.mean[1])
    assert scales_of({"one": one, "two": two}).features == Scale([5.0, 4.0], [10.0**0.5, 2.0])
    assert scales_of({"one": one, "two": two}, fewest=2).features is None, "b would tell of one device"


def test_names_decide_where_the_operator_gives_none() -> None:
    profiles = {"a": series(3, "xy"), "b": series(9, "xy"), "c": series(5, "yx")}
    agreement = agree(profiles, form=DataSettings(fit=True, shape=[5, 2]))
    assert set(agreement.agreed) == {"a", "b"} and "in another order" in str(agreement.odd["c"])
