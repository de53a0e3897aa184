"""Settings, plans, and the settings that a home is bound to."""

import re
from typing import Any

import msgspec
import pytest

from attune.common.config import PrivacySettings, load_settings
from attune.common.errors import HomeMismatch, SettingError, ShapeMismatch, UndeclaredLabels
from attune.common.plan import Plan, Profile
from attune.fedserver.core import training_length
from attune.fedserver.core.data_form import agree, check_fits, check_possible
from attune.fedserver.core.planning import make_plan, reconcile, resolve, why_this_model

IMAGES = Profile("images", (8, 8, 1), [3, 9], 100, 30)


def test_defaults_of_an_empty_configuration() -> None:
    effective = resolve({})
    assert effective.method.name == "fedtp"
    assert (effective.round.rounds, effective.round.min_clients, effective.round.clients) == (40, 2, 0)
    assert effective.round.deadline_s == 600
    assert effective.model_name is None


def test_a_methods_defaults_yield_to_what_is_said() -> None:
    assert resolve({"method": {"name": "pfedme"}}).train.momentum == 0
    assert resolve({"method": {"name": "pfedme"}, "train": {"momentum": 0.5}}).train.momentum == 0.5
    assert resolve({"method": {"name": "fedmcsa", "sigma": 7}}).fixed()["method.sigma"] == 7


def test_a_preset_gives_what_is_not_said_and_the_plan_has_the_values() -> None:
    found = resolve({"method": {"name": "fedmcsa", "preset": "published", "sigma": 7}, "model": {"name": "mlr"}})
    assert (found.train.local_steps, found.train.weight_decay, found.round.train) == (20, 1e-3, "all")
    bounds = {"bound_change": 0.0, "bound_samples": 0.0}
    assert make_plan(found, {"a": IMAGES}, "f").method_options == {"sigma": 7, "mu": 5.0} | bounds
    assert resolve({"method": {"name": "fedmcsa", "preset": "published"}, "model": {"name": "dnn"}}).train.weight_decay == 0
    everyday = resolve({"method": {"name": "fedmcsa", "preset": "everyday"}})
    assert everyday.fixed() == resolve({"method": {"name": "fedmcsa"}}).fixed()
    assert everyday.train == resolve({"method": {"name": "fedavg"}}).train
    with pytest.raises(SettingError, match="method fedper has no settings as published"):
        resolve({"method": {"name": "fedper", "preset": "published"}})
    paper = resolve({"method": {"preset": "published"}, "model": {"name": "vit"}})
    assert (paper.train.validation, paper.model_options, paper.train.local_epochs) == (0, {"preset": "paper"}, 5)
    assert resolve({"method": {"preset": "published"}, "train": {"validation": 0.2}}).train.validation == 0.2


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        ({"name": "fedavg"}, 3.0),
        ({"name": "fedtp"}, 3.0),
        ({"name": "fedavg", "robust": "clip"}, 1.0),
        ({"name": "fedavg", "robust": "median"}, 1.0),
        ({"name": "fedavg", "bound_change": 0.0}, 0.0),
        ({"name": "fedmcsa"}, 0.0),
        ({"name": "local"}, 0.0),
    ],
)
def test_the_bound_on_values_that_devices_share(method: dict[str, Any], bound: float) -> None:
    assert resolve({"method": method}).shared_bound == bound


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": {"name": "fedavg"}}, ["4 hostile of 20"]),
        ({"method": {"name": "fedavg"}, "round": {"clients": 5}}, ["4 hostile devices of 20 can be half", "4 hostile of 20"]),
        ({"method": {"name": "fedavg", "robust": "median"}, "round": {"clients": 5}}, ["4 hostile devices of 20 can be half"]),
        ({"method": {"name": "fedavg", "robust": "median"}, "round": {"clients": 9}}, []),
    ],
)
def test_what_the_start_says_of_liars(settings: dict[str, Any], said: list[str]) -> None:
    found = resolve(settings).what_liars_can(20)
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_a_restart_with_another_preset_is_refused() -> None:
    recorded = {"method": {"name": "fedmcsa", "preset": "published"}}
    assert reconcile(recorded, {}) == recorded
    with pytest.raises(HomeMismatch, match=r"method\.mu"):
        reconcile(recorded, {"method": {"preset": "everyday"}})


def test_of_a_changed_schema_the_column_and_field_are_named_and_what_to_do() -> None:
    column = {"kind": "category", "values": [str(number) for number in range(60)]}
    recorded = {"method": {"name": "fedavg"}, "data": {"columns": {f"c{number}": column for number in range(20)}}}
    changed = {"columns": {"c3": {**column, "values": [*column["values"][1:], "other"], "unit": "mg"}}}
    with pytest.raises(HomeMismatch) as refused:
        reconcile(recorded, {"data": changed})
    said = str(refused.value)
    assert "data.columns.c3.unit is not set here, not 'mg'; data.columns.c3.values has ['0'] here and" in said
    assert "data.columns.c3.values lacks ['other'] here" in said and "c4" not in said and len(said) < 450
    assert "fedserver run new NAME --config FILE" in said and "new --home" in said
    with pytest.raises(HomeMismatch, match=r"train\.lr is 0\.03 here, not 0\.5\."):
        reconcile(recorded, {"train": {"lr": 0.5}})


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("method.sigmma=5", "sigmma"),
        ("method.name=fedtpp", "fedtp"),
        ("train.lrr=1", "did you mean 'lr'"),
        ("train.lr=-1", "setting train.lr: Expected `float` > 0"),
        ("round.rounds=0", "round"),
        ("rond.rounds=3", "did you mean 'round'"),
        ("model.name=vitt", "did you mean 'vit'"),
        ("model.widht=3", "did you mean 'width'"),
        ("nonsense", "section.key=value"),
    ],
)
def test_a_mistake_is_named(assignment: str, message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        resolve(load_settings(None, [assignment], {"method": {"name": "fedmcsa"}} if "sigmma" in assignment else {}))


def test_options_of_a_named_model_are_checked_before_any_device_has_come() -> None:
    with pytest.raises(SettingError, match=re.escape("setting model.hidden: Expected `array`, got `int`")):
        resolve({"model": {"name": "dnn", "hidden": 20}})
    with pytest.raises(SettingError, match=re.escape("unknown setting model.width")):
        resolve({"model": {"name": "dnn", "width": 20}})
    assert resolve({"model": {"name": "my.package:factory", "width": "any"}}).model_options == {"width": "any"}


def test_the_same_flags_again_or_none_are_no_contradiction() -> None:
    recorded = {"method": {"name": "fedavg"}, "round": {"rounds": 3}}
    assert reconcile(recorded, {}) == recorded
    assert reconcile(recorded, {"round": {"rounds": 3}}) == recorded
    assert reconcile({}, {"round": {"rounds": 40}}) == {"round": {"rounds": 40}}, "saying a default out loud is fine"
    assert reconcile(recorded, {"server": {"keepalive_s": 5.0}})["server"] == {"keepalive_s": 5.0}


def test_epochs_that_the_samples_decide_cannot_be_set_at_a_restart() -> None:
    with pytest.raises(HomeMismatch, match=r"train\.local_epochs is 'by samples' here, not 9"):
        reconcile({"train": {"lr": 0.1}}, {"train": {"local_epochs": 9}})
    assert reconcile({"train": {"local_epochs": 9}}, {"train": {"local_epochs": 9}}) == {"train": {"local_epochs": 9}}


def test_what_is_done_with_newcomers_can_be_said_when_the_end_is_there() -> None:
    recorded = {"method": {"name": "fedper"}, "round": {"rounds": 3}}
    merged = reconcile(recorded, {"round": {"adapt_rounds": 5, "adapt": "all"}})
    assert (resolve(merged).rules.settings.adapt_rounds, resolve(merged).round.adapt) == (5, "all")
    with pytest.raises(SettingError, match="fedper generates nothing"):
        reconcile(recorded, {"round": {"adapt": "embedding"}})


def test_where_nothing_is_personal_newcomers_get_no_rounds() -> None:
    said = {"method": {"name": "fedavg"}, "round": {"adapt_rounds": 5}}
    assert (resolve(said).adaptation, resolve(said).rules.settings.adapt_rounds) == (None, 0)
    assert resolve(said | {"round": {"adapt_rounds": 5, "adapt": "all"}}).rules.settings.adapt_rounds == 5


@pytest.mark.parametrize(
    ("adapt", "common"), [("personal", False), ("embedding", False), ("hypernetwork", True), ("all", True)]
)
def test_rules_of_the_round_say_whether_newcomers_change_what_all_are_served(adapt, common):
    said = {"method": {"name": "fedtp"}, "round": {"adapt_rounds": 1, "adapt": adapt}}
    assert resolve(said).rules.common is common


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"round": {"rounds": 4}}, "round.rounds is 3 here, not 4"),
        ({"method": {"name": "fedtp"}}, "method.name is 'fedavg' here, not 'fedtp'"),
        ({"seed": 9}, "seed is 0 here, not 9"),
        ({"train": {"lr": 0.5}}, "train.lr is "),
        ({"method": {"uniform": True}}, "method.uniform is False here, not True"),
    ],
)
def test_a_contradiction_is_refused_and_named(said: dict[str, object], named: str) -> None:
    with pytest.raises(HomeMismatch, match=re.escape(named)):
        reconcile({"method": {"name": "fedavg"}, "round": {"rounds": 3}}, said)


def test_the_plan_unites_labels_sorted_whatever_the_order_of_arrival() -> None:
    other = Profile("images", (8, 8, 1), [0, 3], 50, 10)
    plan = make_plan(resolve({}), {"b": IMAGES, "a": other}, "f")
    assert plan.classes == [0, 3, 9]
    assert (plan.model.name, plan.model.classes, plan.model.shape) == ("vit", 3, (8, 8, 1))
    assert plan == make_plan(resolve({}), {"a": other, "b": IMAGES}, "f")


@pytest.mark.parametrize(
    ("profile", "method", "model"),
    [
        (Profile("tokens", (16,), [0, 1], 9, 3, vocabulary=50), "fedavg", "transformer"),
        (Profile("images", (8, 8, 1), [0, 1], 9, 3), "fedavg", "convnet"),
        (Profile("images", (8, 8, 1), [0, 1], 9, 3), "fedbn", "convnet-bn"),
        (Profile("images", (8, 8, 1), [0, 1], 9, 3), "fedtp", "vit"),
        (Profile("images", (8, 8, 1), [0, 1], 9, 3), "fedtp-norm", "vit"),  # a BatchNorm's count cannot be generated
        (Profile("series", (16, 3), [0, 1], 9, 3), "fedavg", "dnn"),
        (Profile("series", (16, 3), [0, 1], 9, 3), "fedtp", "transformer"),
        (Profile("tabular", (13,), ["no", "yes"], 9, 3), "fedavg", "dnn"),
        (Profile("tabular", (13,), ["no", "yes"], 9, 3), "fedtp", "transformer"),
    ],
)
def test_the_model_follows_from_the_kind_of_data_and_has_what_the_method_needs(
    profile: Profile, method: str, model: str
) -> None:
    assert make_plan(resolve({"method": {"name": method}}), {"a": profile}, "f").model.name == model


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [
        ("fedtp", None, "a transformer, because the usual model for tabular, dnn, has no qkv, which method fedtp needs"),
        ("fedavg", None, ""),
        ("fedtp", "transformer", ""),  # the model was named, so there was no choice
    ],
)
def test_a_model_that_is_not_the_usual_one_is_explained(method: str, model: str | None, said: str) -> None:
    settings = resolve({"method": {"name": method}} | ({"model": {"name": model}} if model else {}))
    plan = make_plan(settings, {"a": Profile("tabular", (6,), [0, 1], 50, 9)}, "f")
    assert why_this_model(settings, plan) == said


def test_a_model_that_an_option_asks_for_is_explained() -> None:
    settings = resolve({"method": {"name": "fedavg"}, "model": {"width": 8}})
    plan = make_plan(settings, {"a": IMAGES}, "f")
    assert plan.model.name == "vit"
    assert why_this_model(settings, plan) == "a vit, because the usual model for images, convnet, has no option width"


def test_devices_with_noise_get_no_batch_statistics() -> None:
    settings = resolve({"method": {"name": "fedbn"}, "privacy": {"unit": "example", "noise": 1.0}})
    assert make_plan(settings, {"a": IMAGES}, "f").model.name == "vit"


@pytest.mark.parametrize(
    ("samples", "epochs"),
    [
        ([10, 10, 10], 25),  # one batch an epoch: at most 25 epochs
        ([100, 100, 5000], 17),  # 90 are not held out: 3 batches of 32, ceil(50 / 3)
        ([5, 100, 100], 17),  # the median, so that no single device decides
        ([400, 400, 400], 5),  # 360: 12 batches, and 5 epochs are 60 steps
        ([1000], 5),  # never fewer than 5
    ],
)
def test_the_median_device_takes_fifty_steps_a_round(samples: list[int], epochs: int, monkeypatch) -> None:
    monkeypatch.setattr(training_length, "MOST_USUAL_EPOCHS", 25)  # tests/conftest.py has another one
    profiles = {f"d{n}": msgspec.structs.replace(IMAGES, samples=count) for n, count in enumerate(samples)}
    assert make_plan(resolve({}), profiles, "f").train.local_epochs == epochs
    assert make_plan(resolve({"train": {"local_steps": 0}}), profiles, "f").train.local_epochs == epochs
    assert make_plan(resolve({"train": {"local_epochs": 5}}), profiles, "f").train.local_epochs == 5
    assert make_plan(resolve({"train": {"local_steps": 9}}), profiles, "f").train.local_epochs == 5
    noisy = {"privacy": {"unit": "example", "noise": 1.0}}
    assert make_plan(resolve(noisy), profiles, "f").train.local_epochs == 5, "each step costs a part of a budget"
    published = resolve({"method": {"name": "fedtp", "preset": "published"}})
    assert make_plan(published, profiles, "f").train.local_epochs == 5
    secure = resolve({"method": {"name": "fedavg"}, "privacy": {"secure_aggregation": True}})
    [masks] = make_plan(secure, profiles, "f").transforms.values()
    assert masks["most_samples"] == min(max(samples), 5 * sorted(samples)[len(samples) // 2])


def test_what_does_not_fit_the_plan_is_refused_with_what_was_expected() -> None:
    plan = make_plan(resolve({}), {"a": IMAGES}, "f")
    check_fits(IMAGES, plan, "a")
    with pytest.raises(ShapeMismatch, match=r"images of shape \(9, 8, 1\).*expects images of shape \(8, 8, 1\)"):
        check_fits(Profile("images", (9, 8, 1), [3], 1, 0), plan, "late")
    with pytest.raises(UndeclaredLabels, match=r"late has labels \[4\].*\[3, 9\]"):
        check_fits(Profile("images", (8, 8, 1), [3, 4], 1, 0), plan, "late")
    [odd] = agree({"a": IMAGES, "b": IMAGES, "odd": Profile("tabular", (8,), [3], 1, 0)}).odd.values()
    assert isinstance(odd, ShapeMismatch) and "tabular" in str(odd)


TEXT = Profile("tokens", (16,), [0, 1], 9, 3, vocabulary=50, per_position=True)


def test_labels_for_every_position_are_in_the_plan_and_everybody_must_have_them() -> None:
    plan = make_plan(resolve({}), {"a": TEXT}, "f")
    assert plan.model.per_position and not make_plan(resolve({}), {"a": IMAGES}, "f").model.per_position
    check_fits(TEXT, plan, "a")
    other = msgspec.structs.replace(TEXT, per_position=False)
    found = agree({"a": TEXT, "b": TEXT, "odd": other})
    assert list(found.agreed) == ["a", "b"]
    with pytest.raises(ShapeMismatch, match=r"odd has a label for every sequence; .* expects one for every position") as caught:
        check_fits(other, plan, "odd")
    assert str(found.odd["odd"]) == str(caught.value)
    with pytest.raises(ShapeMismatch, match=r"has a label for every position; .* expects one for every sequence"):
        check_fits(TEXT, make_plan(resolve({}), {"a": other}, "f"), "odd")


def test_tokens_and_images_alone_have_labels_for_every_position() -> None:
    check_possible(TEXT, "a")
    with pytest.raises(SettingError, match="odd declares a label for every position of series"):
        check_possible(msgspec.structs.replace(IMAGES, kind="series", shape=(8, 2), per_position=True), "odd")


def test_a_plain_plan_and_profile_have_the_fields_of_version_1_alone() -> None:
    """Devices compare a plan's bytes: what a federation does not use is not in it."""
    plan = make_plan(resolve({"method": {"name": "fedavg"}, "privacy": {"unit": "none"}}), {"a": IMAGES}, "f")
    first = {"classes", "federation", "method", "method_options", "model", "no_closed_form", "portfolio", "seed", "train"}
    assert msgspec.json.decode(msgspec.json.encode(plan)).keys() == first
    fields = msgspec.json.decode(msgspec.json.encode(IMAGES)).keys()
    assert fields.isdisjoint({"schema", "proposal", "rare", "variant"}) and {"kind", "labels", "samples", "shape"} < fields


def test_the_section_on_privacy_is_in_the_plan_and_checked() -> None:
    plan = make_plan(resolve({"method": {"name": "fedavg"}}), {"a": IMAGES}, "f")
    private = msgspec.structs.replace(plan, privacy=PrivacySettings(unit="example", epsilon=4))
    assert msgspec.json.decode(msgspec.json.encode(private))["privacy"] == {"unit": "example", "epsilon": 4}
    assert msgspec.json.decode(msgspec.json.encode(private), type=Plan) == private
    for wrong, answer in (
        ({"privacy": {"epsilom": 4}}, "unknown setting privacy.epsilom.*did you mean 'epsilon'"),
        ({"privacy": {"delta": 1}}, r"setting privacy\.delta: Expected `float` < 1"),
        ({"privacy": {"unit": "sample"}}, r"setting privacy\.unit"),
    ):
        with pytest.raises(SettingError, match=answer):
            resolve(wrong)
    with pytest.raises(HomeMismatch, match=r"privacy\.delta is 1e-05 here, not 0\.001"):
        reconcile({}, {"privacy": {"delta": 1e-3}})


@pytest.mark.parametrize(
    ("privacy", "named"),
    [
        ({"unit": "example", "epsilon": 4.0}, 'embedding = "described" cannot be combined with privacy.unit = "example"'),
        (
            {"unit": "client", "epsilon": 4.0, "devices": 100},
            'embedding = "described" cannot be combined with privacy.unit',
        ),
        ({"secure_aggregation": True}, "privacy.secure_aggregation gives the server sums alone"),
    ],
)
def test_embeddings_from_descriptions_are_refused_beside_privacy(privacy: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        resolve({"method": {"name": "fedtp", "embedding": "described"}, "privacy": privacy})
