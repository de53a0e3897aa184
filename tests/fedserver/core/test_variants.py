"""Settings of variants: what [[model.variant]] may say, what the plan has of it, and what is refused by name."""

from typing import Any

import msgspec
import pytest

from attune.common.errors import HomeMismatch, SettingError
from attune.common.plan import Plan, Profile
from attune.common.text import from_json
from attune.fedserver.choosing.candidates import check_race
from attune.fedserver.consent import code_in
from attune.fedserver.core.planning import make_plan, reconcile, resolve

PROFILES = {name: Profile("images", (8, 8, 1), [0, 1, 2], 40, 20) for name in "ab"}


def settings(*variants: Any) -> dict[str, Any]:
    return {"method": {"name": "fedavg"}, "model": {"name": "dnn", "hidden": [16, 8], "variant": list(variants)}}


def planned(given: dict[str, Any]) -> Plan:
    return make_plan(resolve(given), PROFILES, "federation")


def test_a_variant_takes_over_the_options_that_it_does_not_set() -> None:
    variants = [{"name": "small", "depth": 2}, {"name": "conv", "model": "convnet"}, {"name": "same"}]
    vit = {"name": "vit", "width": 8, "heads": 2, "depth": 1}
    plan = planned({"method": {"name": "fedavg"}, "model": {**vit, "variant": variants}})
    assert (plan.model.name, plan.model.options["width"], plan.model.options["depth"]) == ("vit", 8, 1)
    small, conv, same = (plan.variants[name] for name in ("small", "conv", "same"))
    assert (small.name, small.options["width"], small.options["depth"]) == ("vit", 8, 2)
    assert conv.name == "convnet" and "depth" not in conv.options
    assert same == plan.model
    assert plan.of_variant("small") == msgspec.structs.replace(plan, model=small, variants={})
    assert plan.of_variant("").model == plan.model


def test_a_plan_without_its_variants_is_the_one_that_has_none() -> None:
    plan = planned({"method": {"name": "fedavg"}, "model": {"name": "dnn", "hidden": [16, 8]}})
    assert plan.of_variant("") is plan
    varied = planned(settings({"name": "small", "hidden": [4]}))
    assert msgspec.structs.replace(varied, variants={}) == plan
    assert from_json(msgspec.json.encode(varied), Plan) == varied


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ({"name": "small"}, r"model\.variant is a list of tables: write \[\[model\.variant\]\]"),
        ([{"hidden": [4]}], "'None' is no name of a variant"),
        ([{"name": "main"}], "'main' is no name of a variant"),
        ([{"name": "Small"}], "'Small' is no name of a variant: take up to 40 small letters"),
        ([{"name": "../a"}], "no name of a variant"),
        ([{"name": "x" * 41}], "no name of a variant"),
        ([{"name": "a"}, {"name": "a"}], "for each another one"),
        ([{"name": f"v{n}"} for n in range(17)], "has 17 variants; at most 16"),
        ([{"name": "small", "hiden": [4]}], "variant small of the model: unknown setting model.hiden .did you mean 'hidden'"),
        ([{"name": "small", "hidden": 4}], "variant small of the model: setting model.hidden"),
        ([{"name": "small", "model": "dnnn"}], "variant small of the model: unknown model 'dnnn'"),
    ],
)
def test_a_wrong_variant_is_an_error_that_says_which(variants: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve(settings() | {"model": {"name": "dnn", "variant": variants}})


def test_a_variant_must_have_the_roles_that_the_method_needs() -> None:
    with pytest.raises(SettingError, match="variant plain of the model: model dnn has no tensors of the roles qkv"):
        resolve({"method": {"name": "fedtp"}, "model": {"name": "vit", "variant": [{"name": "plain", "model": "dnn"}]}})
    with pytest.raises(SettingError, match="model lstm does not take images"):
        planned(settings({"name": "other", "model": "lstm"}))


def test_a_home_keeps_its_variants_and_names_the_one_that_differs() -> None:
    recorded = settings({"name": "small", "hidden": [4]})
    assert reconcile(recorded, {"server": {"threads": 1}})["model"] == recorded["model"]
    for variants in ([{"name": "small", "hidden": [5]}], [], [{"name": "other", "hidden": [4]}]):
        with pytest.raises(HomeMismatch, match=r"model\.variant"):
            reconcile(recorded, {"model": {"variant": variants}})


def test_a_race_of_methods_has_one_model() -> None:
    with pytest.raises(SettingError, match=r"--method auto cannot be combined with model\.variant"):
        check_race({"method": {"name": "auto"}, "model": {"variant": [{"name": "small", "hidden": [4]}]}})


def test_code_of_a_variant_needs_consent_like_that_of_the_model() -> None:
    own = {"name": "mine", "model": "somewhere.models:tiny"}
    assert code_in(settings(own)) == {"somewhere.models:tiny"}
    assert code_in(settings({"name": "small", "hidden": [4]})) == set()
