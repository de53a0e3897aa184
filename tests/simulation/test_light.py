"""Light devices in simulations: their numbers against an independent calculation, and what they refuse by name."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

import attune
from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.plan import LIGHT, Plan
from attune.fedclient import options
from attune.fedclient.limits import light_plan
from attune.fedclient.model.light_model import LightModel
from attune.fedclient.model.model_info import save
from attune.fedclient.work.light import FixedFeatures
from attune.simulation.result import SimulationResult

NAMES = ("a", "b", "c", "d")
ANALYTIC = {"method.name": "analytic", "model.features": 30, "model.widths": [0.5, 1.0], "model.linear": True}
BLENDED = {"method.name": "fedavg", "model.name": "dnn", "model.hidden": [8], "round.rounds": 2, "train.local_epochs": 1}
Sites = dict[str, Any]


def sites_of(task: str) -> Sites:
    rng, w = np.random.default_rng(1), np.random.default_rng(0).normal(size=(5, 3))
    sites = {}
    for name, samples in zip(NAMES, (40, 24, 60, 31), strict=True):
        x = rng.normal(size=(samples + 16, 5)).astype("f4")
        scores = x @ w + rng.normal(size=(len(x), 3)) / 2
        y = {"classes": scores.argmax(1), "regression": scores[:, :2], "multilabel": (scores > 0).astype(int)}[task]
        sites[name] = (x[:samples], y[:samples], x[samples:], y[samples:])
    return sites


def run(sites: Sites, settings: dict[str, Any], light: tuple[str, ...], task: str = "classes", **more: Any) -> SimulationResult:
    done: SimulationResult = attune.simulate(
        sites, settings=settings, variants=dict.fromkeys(light, LIGHT), task=task, table={"standardise": "federation"},
        progress=False, **{"baseline": "none", **more},
    )  # fmt: skip
    return done


@pytest.mark.parametrize("task", ["classes", "regression", "multilabel"])
@pytest.mark.parametrize("executor", ["sequential", "stacked", "processes"])
def test_a_light_device_comes_to_the_weights_of_a_full_one(task: str, executor: Any, tmp_path: Any) -> None:
    sites = sites_of(task)
    full, mixed = (run(sites, ANALYTIC, light, task, executor=executor) for light in ((), ("a", "c")))
    for name in NAMES:
        expected, model = full.model(name), mixed.model(name)
        W_CD, block = model.tensors["head.weight"].numpy(), int(model.tensors["block"])
        place = FixedFeatures(model.info.model).places[block]
        assert block == int(expected.tensors["block"]) and W_CD.any()
        if model.info.kept == "personalized":
            np.testing.assert_allclose(W_CD[:, place], expected.tensors["head.weight"].numpy()[:, place], rtol=0, atol=1e-8)
        if name in ("a", "c"):
            folder = save(tmp_path / name, model.info, {model.info.main: model.tensors})
            assert_alike(LightModel.load(folder), model, sites[name][2])
    assert {mixed.model(name).info.kept for name in ("a", "c")} <= {"personalized", "local"}


def assert_alike(light: LightModel, model: Any, x: Any) -> None:
    if model.info.task == "regression":
        np.testing.assert_allclose(light.predict(x), model.predict(x), atol=1e-4)
        return
    assert light.predict(x) == model.predict(x)
    np.testing.assert_allclose(light.probabilities(x), model.probabilities(x), atol=1e-5)


def test_what_it_keeps_follows_from_the_sums_of_all_others() -> None:
    """Solve the ridge regressions anew, in float64, from samples that are standardised over all devices."""
    sites = sites_of("classes")
    result = run(sites, {**ANALYTIC, "model.widths": [0.5], "model.linear": False}, NAMES)
    model = result.model("b")
    scale, features = model.standardiser, FixedFeatures(model.info.model)
    assert scale is not None and model.info.kept == "personalized"
    draws = np.random.RandomState(0)
    F = np.float32(draws.standard_normal((5, 30)) * 0.5 / math.sqrt(5)).astype(float)
    p = np.float32(draws.uniform(0, 2 * math.pi, 30)).astype(float)

    def rows(name: str) -> tuple[Any, Any]:
        x = scale.apply(sites[name][0]).astype("f4").astype(float)
        return np.hstack([np.cos(x @ F + p) * math.sqrt(2 / 30), np.ones((len(x), 1))]), np.eye(3)[sites[name][1]]

    np.testing.assert_allclose(features.of(scale.apply(sites["b"][0]).astype("f4")), rows("b")[0], atol=1e-12)
    others = [rows(name) for name in NAMES if name != "b"]
    G, B, (Z, T) = sum(z.T @ z for z, _ in others), sum(z.T @ t for z, t in others), rows("b")
    W = model.tensors["head.weight"].numpy()
    gaps = []
    for gamma in (1e-3, 1e-2, 1e-1, 1.0, 10.0):
        centre = np.linalg.solve(G + gamma * np.eye(31), B)
        for strength in (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3):
            drawn = np.linalg.solve(Z.T @ Z + strength * np.eye(31), Z.T @ T + strength * centre)
            gaps.append(np.abs(drawn.T - W).max())
    assert min(gaps) < 1e-9, "of one gamma and one strength that the server offers"


def test_beside_networks_it_hands_in_sums_alone_and_moves_no_network() -> None:
    sites = sites_of("classes")
    result = run(sites, {**BLENDED, "model.variant": [{"name": "small", "hidden": [4]}]}, ("a", "b"))
    assert {key for key in result.digests if key.startswith("solved/sums/")} == {f"solved/sums/{name}" for name in NAMES}
    told = {client["name"]: client for client in result.status["clients"]}
    assert [told[name]["variant"] for name in NAMES] == ["light", "light", "main", "main"]
    assert (
        told["a"]["accuracy_local"] is not None and told["a"]["accuracy_alone"] is None and told["a"]["accuracy_common"] is None
    )
    assert result.model("a").info.method == "analytic" and result.model("c").info.method == "fedavg"
    without = run({name: sites[name] for name in ("c", "d")}, {**BLENDED, "round.analytic": "off"}, ())
    shared = {key: of for key, of in run(sites, BLENDED, ("a", "b")).digests.items() if key.startswith("shared")}
    assert shared and len(shared) == len([key for key in without.digests if key.startswith("shared")])


def test_a_device_with_too_few_samples_for_folds_keeps_what_others_know() -> None:
    sites = sites_of("classes") | {"e": tuple(part[:3] for part in sites_of("classes")["d"])}
    info = run(sites, ANALYTIC, ("e",)).model("e").info
    assert info.kept == "personalized" and info.samples == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": {"kind": "images", "shape": (8, 8, 1)}}, "here they are images"),
        ({"task": "survival"}, "the task is survival"),
        ({"privacy": PrivacySettings(secure_aggregation=True)}, "its sums over samples are those of many devices alone"),
        ({"given": "sha256:0"}, "it evaluates a given model"),
        ({"train": {"score_after": 1}}, "it chooses among methods (--method auto)"),
        ({"device_transforms": ["clip"]}, "its devices transform updates by clip"),
        (
            {"closed_form": False, "no_closed_form": "devices have no scale"},
            "trains networks without one (devices have no scale)",
        ),
    ],
)
def test_a_plan_that_asks_for_more_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    plan = plan_of()
    assert light_plan(plan).method == "analytic" and light_plan(plan).train.validation == 0
    for name, change in changes.items():
        value = msgspec.structs.replace(getattr(plan, name), **change) if isinstance(change, dict) else change
        plan = msgspec.structs.replace(plan, **{name: value})
    with pytest.raises(SettingError) as error:
        light_plan(plan)
    assert why in str(error.value) and "pip install 'attune-fl[train]'" in str(error.value)


def plan_of() -> Plan:
    from tests.fedserver.core.test_variants import planned

    plan: Plan = planned({"method": {"name": "fedavg"}, "model": {"name": "dnn"}})
    table = msgspec.structs.replace(plan.model, kind="tabular", shape=(5,))
    return msgspec.structs.replace(plan, model=table, closed_form=True)


def test_an_installation_without_torch_is_light_and_has_no_other_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (options.variant_here("main"), options.variant_here("small"), options.variant_here(LIGHT)) == (
        "main",
        "small",
        LIGHT,
    )
    monkeypatch.setattr(options, "HAS_TORCH", False)
    assert (options.variant_here("main"), options.variant_here(LIGHT)) == (LIGHT, LIGHT)
    with pytest.raises(SettingError, match="the variant small of a model needs torch"):
        options.variant_here("small")
