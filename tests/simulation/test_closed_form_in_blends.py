"""The closed form in the blends of other methods, from end to end: what devices are served, and what they keep."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sklearn.datasets import load_digits

import attune
from attune.common.methods.ridge import nothing_solved
from attune.common.models.closed_form import PIXELS
from attune.common.models.options import ClosedFormOptions
from attune.common.plan import ModelSpec, standardisation
from attune.common.schema import Column, Schema
from attune.common.wire.files import TensorFile, read_tensors
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.artifact import Model
from attune.fedclient.work.portfolio.federated import DRAWS, SHARPNESS, FederatedRidge
from attune.fedclient.work.portfolio.fitting import Samples
from attune.fedserver.ports.blobs import blob_of
from tests.e2e.hosted import host

FEATURES = 501  # with the constant
MASKS = {"privacy": {"secure_aggregation": True}}
AVERAGE: dict[str, Any] = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}, "round": {"rounds": 2}}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write shards of one task, with few samples each. So a device gains much from what the others know."""
    images, labels = load_digits(return_X_y=True)
    images, shards = (images * 16).clip(0, 255).astype(np.uint8).reshape(-1, 8, 8, 1), {}
    for place in range(5):
        rows, folder = np.arange(place, len(labels), 5)[:130], tmp_path_factory.mktemp(f"site{place}")
        for part, some in (("train", rows[:30]), ("test", rows[30:])):
            np.savez(folder / f"{part}.npz", x=images[some], y=labels[some])
        shards[f"site{place}"] = folder
    return shards


@pytest.fixture(scope="module", params=[{}, MASKS], ids=["plain", "masked"])
def blended(few: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    return attune.simulate(few, settings={**AVERAGE, **request.param}, baseline="alone", progress=False)


def samples_of(path: Path, classes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and the one-hot labels of a shard's training part, in numpy."""
    shard, (F, p) = load_shard(path), (drawn.astype("f8") for drawn in ClosedFormOptions().drawn(64))
    flat = (shard.train_x.reshape(len(shard.train_x), -1).astype("f4") / 255).astype("f8")
    random = np.cos((flat - PIXELS[0]) / PIXELS[1] @ F + p) * np.sqrt(2 / len(p))
    labels = [classes.index(int(label)) for label in shard.train_y]
    return np.concatenate([random, np.ones((len(flat), 1))], axis=1), np.eye(len(classes))[labels]


def test_a_member_is_an_independent_calculation_from_all_samples(few: dict[str, Path], blended: Any, tmp_path: Path) -> None:
    """The total is the sum over all training samples, and a device's weights are drawn from those of the other devices."""
    classes = [int(label) for label in blended._plan.classes]
    known = {name: samples_of(path, classes) for name, path in few.items()}
    (slot,) = [slot for slot in blended._outcome.snapshot.slots if (slot.part, slot.key) == ("solved", "total")]
    with TensorFile(blended._state.storage.blobs.open(blob_of(slot))) as file:
        total = {name: file[name].numpy() for name in file.manifest}
    G, B = (sum(Z.T @ right for Z, right in pairs) for pairs in ([(Z, Z) for Z, _ in known.values()], known.values()))
    np.testing.assert_allclose(total["gram"], G[np.triu_indices(FEATURES)], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(total["cross"], B, rtol=1e-10, atol=1e-10)
    identity, checked = np.eye(FEATURES), 0
    for name, (Z, T) in known.items():
        members = Model.load(blended.save(tmp_path / name) / "models" / name).members
        served = np.linalg.solve(G - Z.T @ Z + float(total["gamma"][0]) * identity, B - Z.T @ T)
        for member, strength in DRAWS.items():
            if member in members:
                own = np.linalg.solve(Z.T @ Z + strength * identity, Z.T @ T + strength * served)
                np.testing.assert_allclose(members[member].tensors["weight"], SHARPNESS * own.T[:, :-1], atol=1e-8)
                checked += 1
    assert checked >= len(few)


def test_devices_keep_it_and_predict_better(few: dict[str, Path], blended: Any, tmp_path: Path) -> None:
    without = attune.simulate(
        few, settings={**AVERAGE, "round": {"rounds": 2, "analytic": "off"}}, baseline="alone", progress=False
    )
    assert blended.status["closed_form"].startswith("the closed form") and without.status["closed_form"] is None
    kept, before = (np.mean([c["accuracy_kept"] for c in r.status["clients"]]) for r in (blended, without))
    assert kept > before + 0.02
    alone = [[client["accuracy_alone"] for client in result.status["clients"]] for result in (blended, without)]
    assert alone[0] == alone[1], "what a device would take alone does not change"
    saved = blended.save(tmp_path / "saved") / "models"
    for client in blended.status["clients"]:
        model = Model.load(saved / client["name"])
        assert model.evaluate(load_shard(few[client["name"]]))[0] == pytest.approx(client["accuracy_kept"])
        assert {"closed-form", "closed-form-near", "closed-form-far"} & set(model.info.weights)


def test_a_device_that_is_not_drawn_in_round_1_has_the_sum_of_the_others(few: dict[str, Path], tmp_path: Path) -> None:
    """It takes nothing out of the sum, and draws its models from the weights of all that are in it."""
    more = {**few, "late": shutil.copytree(few["site0"], tmp_path / "late")}
    of = {**AVERAGE, **MASKS, "round": {"rounds": 2, "clients": 5, "over_selection": 0.0}}
    result = attune.simulate(more, settings=of, baseline="alone", home=tmp_path / "home", progress=False)
    state = tmp_path / "home" / "server" / "state"
    inside = {path.name.split(".")[1].removeprefix("sums~") for path in state.glob("solved.sums~*")}
    (outside,) = more.keys() - inside
    assert len(inside) == 5 and not list(state.glob("solved.sums~*.2.safetensors")), "round 2 brings no other sum"
    total = read_tensors(next(state.glob("solved.total.*")))
    Z, T = samples_of(more[outside], [int(label) for label in result._plan.classes])
    members = Model.load(result.save(tmp_path / "saved") / "models" / outside).members
    for member in DRAWS.keys() & members.keys():
        right = Z.T @ T + DRAWS[member] * total["head.weight"].numpy().T
        own = np.linalg.solve(Z.T @ Z + DRAWS[member] * np.eye(FEATURES), right)
        np.testing.assert_allclose(members[member].tensors["weight"], SHARPNESS * own.T[:, :-1], atol=1e-8)
    assert DRAWS.keys() & members.keys()


def test_a_device_that_has_lost_what_it_gave_or_is_served_no_sum_has_no_such_models(few: dict[str, Path]) -> None:
    shard, plan = load_shard(few["site0"]), ModelSpec("mlr", "images", (8, 8, 1), 10)
    samples = Samples(shard.train_x.reshape(30, -1).astype("f4") / 255, shard.train_y.astype("i8"), "classes", "images")
    ridge = FederatedRidge(plan, samples, np.arange(len(shard.train_y)))
    given = ridge.sums(one_sum=True)
    served = nothing_solved(10, [FEATURES], one_sum=True)
    assert ridge.models(served, given) == {}, "before the sum"
    of_two = {"gram": 2 * given["gram"], "cross": 2 * given["cross"], "counted": served["counted"] + 1}
    served |= {**of_two, "gamma": served["gamma"] + 0.1, "strength": served["strength"] + 1, "head.weight": given["cross"].T}
    assert set(ridge.models(served, given)) == set(DRAWS)
    assert ridge.models(served) == {} == ridge.models(served | {"gram": 0 * given["gram"] - 1}, given)


@pytest.mark.parametrize("more", [{}, MASKS], ids=["plain", "masked"])
def test_a_device_that_scales_its_columns_by_itself_is_in_no_sum(more: dict[str, Any], tmp_path: Path) -> None:
    """The scale of the others is in the plan, and a sum over differently scaled columns means nothing."""
    draws, shards = np.random.default_rng(2), {}
    for site in range(6):
        x = draws.normal(size=(60, 3)).astype("f4") + site
        y = (np.sin(2 * x[:, 0]) + x[:, 1] > site).astype("i8")
        shards[f"s{site}"] = folder = tmp_path / f"s{site}"
        folder.mkdir()
        np.savez(folder / "train.npz", x=x[:40], y=y[:40])
        np.savez(folder / "test.npz", x=x[40:], y=y[40:])
        scale = True if site == 5 else "federation"
        (folder / "meta.json").write_bytes(msgspec.json.encode({"classes": [0, 1], "standardise": scale}))
    result = attune.simulate(shards, settings={**AVERAGE, **more}, baseline="alone", home=tmp_path / "home", progress=False)
    assert result._plan.scale is not None
    if more:
        assert "1 of 6 devices were in such a sum before" in result.status["closed_form"]
        return
    total = read_tensors(next((tmp_path / "home" / "server" / "state").glob("solved.total.*")))
    assert float(total["gram"][-1]) == 200, "five sites of 40 samples"
    saved = result.save(tmp_path / "saved") / "models"
    fitted = {name: {member for member in Model.load(saved / name).info.weights if member in DRAWS} for name in shards}
    assert not fitted["s5"] and any(fitted.values())


NUMBERS = {"age": Column("number", range=(0.0, 100.0)), "dose": Column("number", range=(-5.0, 25.0))}
SCHEMA = Schema.of({**NUMBERS, "sex": Column("category", values=["f", "m"])})


@pytest.mark.parametrize(
    ("settings", "part"),
    [({"method": {"name": "analytic"}}, "attended"), (AVERAGE, "solved"), ({**AVERAGE, **MASKS}, "solved")],
    ids=["analytic", "blends", "masked"],
)
def test_ranges_of_a_schema_are_the_scale_where_no_device_tells_statistics(
    settings: dict[str, Any], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks have each device's own scale, and the closed form that of the ranges: its sums are those of all samples.

    Behind masks a device must take the scale of all, if there is one, before it knows that there is none.
    """
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    draws, shards, x, y = np.random.default_rng(0), {}, [], []
    for site in range(5):
        age, dose, is_male = draws.normal(30 + 8 * site, 9, 60), draws.normal(10, 5, 60), draws.integers(2, size=60)
        x.append(np.stack([age, dose, 1 - is_male, is_male, 0 * age], axis=1).astype("f4"))
        y.append((np.sin(dose / 3) + age / 50 > 1).astype("i8"))
        shards[f"s{site}"] = folder = tmp_path / f"s{site}"
        folder.mkdir()
        np.savez(folder / "train.npz", x=x[-1][:40], y=y[-1][:40])
        np.savez(folder / "test.npz", x=x[-1][40:], y=y[-1][40:])
        meta = {"classes": [0, 1], "schema": SCHEMA, "columns": SCHEMA.feature_names, "missing": "median"}
        scale = {"standardise": "federation" if "privacy" in settings else site % 2 == 0 or "federation"}
        (folder / "meta.json").write_bytes(msgspec.json.encode(meta | scale))
    hosted = host(tmp_path, shards, settings, baseline="none" if part == "attended" else "alone", disclose=("sums",))
    plan = hosted.home.snapshot().plan
    assert plan is not None and plan.scale is None and plan.closed_form is (part == "solved")
    assert ("ranges of the schema" in standardisation(plan)) is (part == "attended")
    x_NI = np.concatenate([some[:40] for some in x]).astype("f8")
    x_NI[:, :2] = (x_NI[:, :2] - [50, 10]) / [50, 15]
    options = ClosedFormOptions()
    Z = options.values(x_NI, *(drawn.astype("f8") for drawn in options.drawn(5)), np)
    T = np.eye(2)[np.concatenate([some[:40] for some in y])]
    total = read_tensors(max((hosted.home.path / "state").glob(f"{part}.total.*")))
    np.testing.assert_allclose(total["gram"].numpy(), (Z.T @ Z)[np.triu_indices(FEATURES)], atol=1e-6)
    np.testing.assert_allclose(total["cross"].numpy(), Z.T @ T, atol=1e-6)
    assert part == "attended" or any(DRAWS.keys() & Model.load(hosted.model(name)).info.weights.keys() for name in shards)
