"""A column that a site lacks, or has besides, is named: before the plan, against it, and against what the operator declares."""

import pytest

from attune.common.config import TrainSettings
from attune.common.errors import ShapeMismatch
from attune.common.plan import DataSettings, Kind, ModelSpec, Plan, Profile
from attune.fedserver.core.data_form import agree, check_declared, check_fits


def profile(*names: str, kind: Kind = "tabular") -> Profile:
    shape = (len(names),) if kind == "tabular" else (9, len(names))
    return Profile(kind, shape, [0, 1], 30, 10, column_names=list(names))


@pytest.mark.parametrize("kind", ["tabular", "series"])
def test_the_devices_columns_decide_and_the_odd_one_hears_what_it_lacks(kind: Kind) -> None:
    usual = profile("age", "dose", "weight", kind=kind)
    agreement = agree({"kiel": usual, "lund": usual, "oslo": profile("age", "weight", kind=kind), "riga": usual})
    assert "lacks the columns 'dose'" in str(agreement.odd["oslo"])
    more = agree({"kiel": usual, "lund": usual, "oslo": profile("age", "dose", "weight", "zip", kind=kind)})
    assert "has 'zip' besides" in str(more.odd["oslo"])


def test_without_a_majority_the_columns_in_question_are_named() -> None:
    agreement = agree({"kiel": profile("age", "dose"), "lund": profile("age")})
    assert "lund" in agreement.tie and "lacks the columns 'dose'" in agreement.tie


def test_against_the_plan_and_against_what_is_declared() -> None:
    plan = Plan(
        federation="f", seed=0, model=ModelSpec("dnn", "tabular", (2,), 2), classes=[0, 1], method="fedavg",
        method_options={}, train=TrainSettings(), column_names=["age", "dose"],
    )  # fmt: skip
    with pytest.raises(ShapeMismatch, match="lacks the columns 'dose'"):
        check_fits(profile("age"), plan, "oslo")
    declared = DataSettings(kind="tabular", shape=[2], columns=["age", "dose"])
    with pytest.raises(ShapeMismatch, match="lacks the columns 'dose'"):
        check_declared(profile("age"), declared, "oslo")


def test_without_names_the_shapes_are_compared() -> None:
    unnamed = Profile("tabular", (1,), [0, 1], 30, 10)
    assert "expects tabular of shape (2,)" in str(agree({n: profile("a", "b") for n in "xy"} | {"z": unnamed}).odd["z"])
