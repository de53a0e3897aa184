"""Simulations with variants of a model: each device ends with its own network, in each way to compute them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import attune
from attune.common.errors import SettingError
from attune.common.plan import ModelSpec
from attune.fedserver.view.homes import render_status
from attune.simulation.result import SimulationResult

VARIANT = [{"name": "small", "hidden": [4]}]
ROUNDS = {"method.name": "fedavg", "train.local_epochs": 1, "round.rounds": 2}
USUAL = {**ROUNDS, "model.name": "dnn", "model.hidden": [16]}
NAMES = [f"site-{n}" for n in range(6)]
OF = dict.fromkeys(NAMES[:3], "small")


@pytest.fixture(scope="module")
def sites() -> dict[str, Any]:
    rng, w = np.random.default_rng(1), np.random.default_rng(0).normal(size=(5, 3))
    drawn = {name: rng.normal(size=(40, 5)).astype("f4") for name in NAMES}
    return {name: (x[:24], (x @ w).argmax(1)[:24], x[24:], (x @ w).argmax(1)[24:]) for name, x in drawn.items()}


def run(sites: dict[str, Any], variants: dict[str, str] = OF, variant: Any = VARIANT, **more: Any) -> SimulationResult:
    settings = {**more.pop("usual", USUAL), "model.variant": variant, **more.pop("settings", {})}
    done: SimulationResult = attune.simulate(
        sites, seed=3, settings=settings, variants=variants, progress=False, **{"baseline": "none", **more}
    )
    return done


def sizes(result: SimulationResult) -> dict[str, int]:
    return {name: result.model(name).info.model.options["hidden"][0] for name in result.devices}


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedtp", "fedmcsa", "ditto", "local"])
def test_stacked_devices_are_those_that_train_one_by_one(method: str, sites: dict[str, Any]) -> None:
    settings = {"method.name": method, "model.name": "transformer", "model.width": 8, "model.heads": 2, "model.depth": 1}
    variant, kept = [{"name": "small", "width": 4}], "personalized"
    one, other = (
        run(sites, variant=variant, settings=settings, usual=ROUNDS, executor=executor, keep=kept)
        for executor in ("sequential", "stacked")
    )
    for name in NAMES:
        expected, shape = one.model(name).probabilities(sites[name][2]), (16, 3)
        assert expected.shape == shape and one.model(name).info.model.options["width"] == (4 if name in OF else 8)
        np.testing.assert_allclose(other.model(name).probabilities(sites[name][2]), expected, atol=1e-4)


def test_a_blend_has_the_closed_form_of_all_devices_and_a_network_of_the_own_variant(sites: dict[str, Any]) -> None:
    pictures = {name: (x[..., None, None], y, other[..., None, None], of) for name, (x, y, other, of) in sites.items()}
    result = run(pictures, baseline="alone")
    assert sizes(result) == {name: 4 if name in OF else 16 for name in NAMES}
    solved = {key for key in result.digests if key.startswith("solved/sums/")}
    assert solved == {f"solved/sums/{name}" for name in NAMES}
    assert {key.partition("/")[0] for key in result.digests} == {"shared", "shared@small", "solved"}
    assert all(client["accuracy_common"] is not None for client in result.status["clients"])
    assert any("closed-form" in result.model(name).info.weights for name in OF), "it is a member of blends"


def test_status_table_and_files_name_the_variant(sites: dict[str, Any], tmp_path: Path) -> None:
    result = run(sites)
    assert {client["name"]: client["variant"] for client in result.status["clients"]} == {
        name: OF.get(name, "main") for name in NAMES
    }
    [head, first] = [line for line in render_status(result.status).splitlines() if line.startswith(("device", "site-0"))]
    assert head.split()[-2:] == ["variant", "note"] and first.split()[-1] == "small"
    result.save(tmp_path)
    exported = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert exported == ["shared.safetensors", "shared@small.safetensors"]
    plain = attune.simulate(sites, seed=3, settings=USUAL, progress=False, baseline="none")
    assert all(client["variant"] is None for client in plain.status["clients"]) and "variant" not in render_status(plain.status)


def test_a_home_goes_on_with_the_same_bits_and_refuses_another_variant(sites: dict[str, Any], tmp_path: Path) -> None:
    whole = run(sites, settings={"round.rounds": 3})
    stopped = run(sites, settings={"round.rounds": 3}, home=tmp_path / "home")
    assert stopped.digests == whole.digests == run(sites, settings={"round.rounds": 3}, home=tmp_path / "home").digests
    with pytest.raises(SettingError, match="site-5 has the variant 'main' of the model in this run, not 'small'"):
        run(sites, variants={**OF, "site-5": "small"}, settings={"round.rounds": 3}, home=tmp_path / "home")
    with pytest.raises(SettingError, match="there is no such device"):
        run(sites, variants={"site-9": "small"})
    with pytest.raises(SettingError, match="no variant 'large' of its model: it has small, main"):
        run(sites, variants={"site-0": "large"})


def make_net(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(spec.shape[0], 3), nn.ReLU(), nn.Linear(3, spec.classes))


def test_a_module_of_ones_own_may_be_a_variant(sites: dict[str, Any]) -> None:
    mine = f"{__name__}:make_net"
    result = run(sites, variant=[{"name": "small", "model": mine}])
    assert {name: result.model(name).info.model.name for name in NAMES} == {
        name: mine if name in OF else "dnn" for name in NAMES
    }


def make_frozen(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Linear(spec.shape[0], 8).requires_grad_(False), nn.Linear(8, spec.classes))


def test_a_frozen_body_is_refused_by_name(sites: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"model\.variant cannot be combined with a frozen body"):
        run(sites, variant=[{"name": "small", "model": f"{__name__}:make_frozen"}])


def test_buffered_updates_of_each_variant_make_its_next_state(sites: dict[str, Any]) -> None:
    result = run(sites, settings={"round.mode": "buffered", "round.buffer": 3, "round.rounds": 4})
    assert sizes(result) == {name: 4 if name in OF else 16 for name in NAMES}
    assert {arrival.device for arrival in result.arrivals} == set(NAMES)
