"""Tasks before round 1: agreement, refusals by name, and the task in the plan."""

import msgspec
import pytest

from attune.common.errors import SettingError, ShapeMismatch
from attune.common.methods.registry import get, names
from attune.common.plan import Columns, Profile, Scale
from attune.fedserver.core.data_form import agree, check_declared, check_fits, check_possible
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.lab.declared import check_declared as check_settings

CLASSES = Profile("tabular", (3,), [0, 1], 10, 4)
DOSE = Profile("tabular", (3,), ["dose"], 10, 4, task="regression", targets=Columns(10, [5.0], [40.0]))
SEVERAL = Profile("tabular", (3,), ["cough", "ache"], 10, 4, task="multilabel")
SURVIVAL = Profile("tabular", (3,), ["months", "died"], 10, 4, task="survival")
FEDAVG = resolve({"method": {"name": "fedavg"}})


def test_a_device_with_another_task_is_refused_by_name() -> None:
    found = agree({"a": DOSE, "b": DOSE, "odd": CLASSES, "other": msgspec.structs.replace(DOSE, labels=["weight"])})
    assert not found.agreed and "for regression of 1 targets (dose): 2 devices" in found.tie
    found = agree({"a": DOSE, "b": DOSE, "odd": CLASSES})
    assert list(found.agreed) == ["a", "b"]
    text = r"the shard of odd is for classes; this federation is for regression of 1 targets \(dose\). y must be numbers"
    with pytest.raises(ShapeMismatch, match=text) as caught:
        check_fits(CLASSES, make_plan(FEDAVG, {"a": DOSE}, "f"), "odd")
    assert str(found.odd["odd"]) == str(caught.value)
    with pytest.raises(ShapeMismatch, match=r"odd is for regression of 1 targets \(dose\); this federation is for classes"):
        check_fits(DOSE, make_plan(FEDAVG, {"a": CLASSES}, "f"), "odd")
    swapped = msgspec.structs.replace(SEVERAL, labels=["ache", "cough"])
    with pytest.raises(ShapeMismatch, match=r"multilabel of 2 labels \(ache, cough\); .* of 2 labels \(cough, ache\)"):
        check_fits(swapped, make_plan(FEDAVG, {"a": SEVERAL}, "f"), "odd")


def test_the_plan_folds_the_targets_of_all_devices() -> None:
    """Expect mean 7 of 5 and 8 with 10 and 20 samples; squares 40 + 80 + 9 * 10 * 20 / 30 = 180, over 30: variance 6."""
    other = msgspec.structs.replace(DOSE, samples=20, targets=Columns(20, [8.0], [80.0]))
    plan = make_plan(FEDAVG, {"a": DOSE, "b": other}, "f")
    assert (plan.task, plan.classes, plan.model.classes) == ("regression", ["dose"], 1)
    assert plan.targets is not None and plan.targets.mean == [7.0] and plan.targets.std == pytest.approx([6**0.5])
    flat = msgspec.structs.replace(DOSE, targets=Columns(10, [5.0], [0.0]))
    assert make_plan(FEDAVG, {"a": flat}, "f").targets == Scale([5.0], [1.0])
    assert make_plan(FEDAVG, {"a": SEVERAL}, "f").classes == ["cough", "ache"], "in the order of y's columns"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "classes"}, "declares sums of targets that its shard cannot have"),
        ({"targets": Columns(9, [5.0], [40.0])}, "sums of targets that its shard cannot have"),
        ({"targets": Columns(10, [5.0, 1.0], [40.0, 1.0])}, "cannot have"),
        ({"targets": Columns(10, [1e200], [40.0])}, "cannot have"),
        ({"targets": Columns(10, [5.0], [-1.0])}, "cannot have"),
        ({"kind": "tokens", "vocabulary": 5, "per_position": True}, "declares regression for every position"),
    ],
)
def test_profiles_that_no_shard_has(wrong, message) -> None:
    check_possible(DOSE, "odd")
    with pytest.raises(SettingError, match=f"odd .*{message}|odd {message}"):
        check_possible(msgspec.structs.replace(DOSE, **wrong), "odd")


ONLY_CLASSES = {"fedrod": "fedrep", "fedtp+fedrod": "fedrep, fedper or fedtp", "pfedgp": r"fedavg\+ft", "fedtp+knn": "fedtp"}


@pytest.mark.parametrize("method", names())
@pytest.mark.parametrize("profile", [DOSE, SEVERAL, SURVIVAL])
def test_methods_that_know_classes_alone_refuse_before_round_1_and_say_what_to_take(method, profile) -> None:
    settings = resolve({"method": {"name": method}})
    declared = resolve({"method": {"name": method}, "data": {"task": profile.task}})
    if method == "analytic" and profile is SURVIVAL:
        for check in (lambda: make_plan(settings, {"a": profile}, "f"), lambda: check_settings(declared)):
            with pytest.raises(SettingError, match="the Cox loss has no closed form"):
                check()
        return
    if method not in ONLY_CLASSES:
        assert make_plan(settings, {"a": profile}, "f").task == profile.task
        check_settings(declared)
        return
    message = f"method {get(method).name.replace('+', '.')} cannot be used for {profile.task}: .*Take {ONLY_CLASSES[method]}"
    with pytest.raises(SettingError, match=message):
        make_plan(settings, {"a": profile}, "f")
    with pytest.raises(SettingError, match=message):
        check_settings(declared)
    make_plan(settings, {"a": CLASSES}, "f")


def test_the_operator_declares_the_task() -> None:
    data = resolve({"data": {"task": "regression", "classes": ["dose"]}}).data
    check_declared(DOSE, data, "a")
    with pytest.raises(ShapeMismatch, match=r"odd is for classes; this federation is for regression of 1 targets \(dose\)"):
        check_declared(CLASSES, data, "odd")


def test_a_plan_of_survival_has_one_output_and_holds_no_sample_out() -> None:
    check_possible(SURVIVAL, "a")
    with pytest.raises(SettingError, match="odd declares 1 columns of survival: a time and an event are needed"):
        check_possible(msgspec.structs.replace(SURVIVAL, labels=["months"]), "odd")
    assert FEDAVG.train.validation > 0
    plan = make_plan(FEDAVG, {"a": SURVIVAL, "b": SURVIVAL}, "f")
    assert (plan.classes, plan.model.classes, plan.train.validation) == (["months", "died"], 1, 0)
    other = msgspec.structs.replace(SURVIVAL, labels=["weeks", "died"])
    with pytest.raises(ShapeMismatch, match=r"survival of 2 columns \(weeks, died\); .* of 2 columns \(months, died\)"):
        check_fits(other, plan, "odd")


CLIP = {"privacy": {"unit": "example", "noise": 1.0}, "method": {"name": "fedavg"}}
NOT_FOR_SURVIVAL = {
    "example": (CLIP, 'survival.* privacy.unit = "example": .*no sample has a gradient .*Take privacy.unit = "client"'),
    "group": (
        {**CLIP, "privacy": {"unit": "group", "noise": 1.0}},
        'survival" cannot be combined with privacy.unit = "group"',
    ),
    "dial": (
        {"method": {"name": "fedmcsa", "dial": True}},
        'data.task = "survival" cannot be combined with method.dial: it chooses by how likely',
    ),
    "auto": ({"train": {"score_after": [1]}}, "survival.* train.score_after: .*in place of --method auto name a method"),
}


@pytest.mark.parametrize("given", NOT_FOR_SURVIVAL)
def test_what_needs_a_loss_or_a_likelihood_of_a_sample_is_refused_before_round_1(given) -> None:
    sections, message = NOT_FOR_SURVIVAL[given]
    with pytest.raises(SettingError, match=message):
        make_plan(resolve(sections), {"a": SURVIVAL}, "f")
    with pytest.raises(SettingError, match=message):
        check_settings(resolve({**sections, "data": {"task": "survival"}}))
    assert make_plan(resolve(sections), {"a": DOSE}, "f").task == "regression"
