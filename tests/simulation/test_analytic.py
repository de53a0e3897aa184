"""`--method analytic` from end to end: on every task it takes, against a pooled calculation, and what it refuses."""

import csv
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import attune
from attune.common.errors import AttuneError, SettingError
from attune.common.methods.ridge import GAMMAS, STRENGTHS, WEIGHT, sums_of
from attune.common.models.closed_form import ClosedFormOnBody
from attune.common.models.registry import build, default_spec
from attune.common.wire.files import read_tensors
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import portable
from attune.fedclient.model.artifact import Model, read_info
from attune.fedclient.work.objectives import sums
from attune.fedserver.view.export import write_state
from tests.e2e.adapted import closed_form
from tests.e2e.harness import digit_shards
from tests.e2e.hosted import host

ANALYTIC: dict[str, Any] = {"method": {"name": "analytic"}, "model": {"features": 60}}
MASKED: dict[str, Any] = {**ANALYTIC, "privacy": {"secure_aggregation": True}}
ON_BODY = "attune.tests.e2e.adapted:closed_form"


def sites(folder: Path, task: str, y_of: Callable[[np.ndarray, int], np.ndarray]) -> dict[str, Path]:
    """Write five shards of three columns, with y by `y_of` (columns, number of the site)."""
    shards = {}
    for site in range(5):
        x = np.random.default_rng(site).normal(size=(60, 3)).astype("f4")
        y, place = y_of(x, site), folder / f"s{site}"
        place.mkdir()
        np.savez(place / "train.npz", x=x[:40], y=y[:40])
        np.savez(place / "test.npz", x=x[40:], y=y[40:])
        (place / "meta.json").write_bytes(msgspec.json.encode({"task": task, "standardise": "federation"}))
        shards[place.name] = place
    return shards


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write five shards of images."""
    return {path.name: path for path in digit_shards(tmp_path_factory.mktemp("five"), 5, 24, 10)}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write shards of two numbers to predict, which are not linear in three columns."""

    def y_of(x: np.ndarray, site: int) -> np.ndarray:
        return np.stack([np.sin(2 * x[:, 0]) + x[:, 1], x[:, 2] ** 2 + 0.2 * site], axis=1).astype("f4")

    return sites(tmp_path_factory.mktemp("numbers"), "regression", y_of)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write shards whose samples may have both of two labels."""

    def y_of(x: np.ndarray, site: int) -> np.ndarray:
        return np.stack([x[:, 0] > 0.3, x[:, 1] + x[:, 2] > 0], axis=1).astype("i8")

    return sites(tmp_path_factory.mktemp("labelled"), "multilabel", y_of)


def last(result: Any) -> list[Any]:
    """Return the rows of the last evaluation."""
    rows = [row for row in result._outcome.snapshot.rows if row.work == "evaluate"]
    return [row for row in rows if row.round == max(row.round for row in rows)]


def check_kept(result: Any, folder: Path, shards: dict[str, Path], features: Callable[[torch.Tensor], np.ndarray]) -> Path:
    """Compare what devices keep with numpy: common strength, weights without the device, its own. Return their folder.

    A device that is alone in a class keeps the common weights.
    """
    saved, classes = result.save(folder) / "models", [int(label) for label in result._plan.classes]
    Z, T = {}, {}
    for name, path in shards.items():
        shard = load_shard(path)
        Z[name] = features(torch.from_numpy(shard.train_x).permute(0, 3, 1, 2).float() / 255)
        T[name] = np.eye(len(classes))[[classes.index(int(label)) for label in shard.train_y]]
    identity = np.eye(Z[name].shape[1])

    def without(name: str, gamma: float) -> np.ndarray:
        others = [other for other in shards if other != name]  # all for the name ""
        G, B = (sum(left[o].T @ right[o] for o in others) for left, right in ((Z, Z), (Z, T)))
        return np.linalg.solve(G + gamma * identity, B)

    errors = [sum(np.square(T[name] - Z[name] @ without(name, gamma)).sum() for name in shards) for gamma in GAMMAS]
    gamma = GAMMAS[int(np.argmin(errors))]
    for name in shards:
        kept = Model.load(saved / name, allow_models=[ON_BODY]).tensors
        strength = float(kept["strength"])
        others_C = sum(of.sum(axis=0) for other, of in T.items() if other != name)
        if (others_C[T[name].any(axis=0)] == 0).any():
            np.testing.assert_allclose(kept[WEIGHT].numpy(), without("", gamma).T, rtol=0, atol=1e-8)
            assert strength == 0
            continue
        own = np.linalg.solve(Z[name].T @ Z[name] + strength * identity, Z[name].T @ T[name] + strength * without(name, gamma))
        np.testing.assert_allclose(kept[WEIGHT].numpy(), own.T, rtol=0, atol=1e-8)
        assert strength in STRENGTHS
    return saved


def test_what_a_device_keeps_is_an_independent_calculation_from_all_samples(digits: dict[str, Path], tmp_path: Path):
    result = attune.simulate(digits, settings=ANALYTIC, keep="personalized", progress=False)
    assert result.status["round"] == 2
    model = build(result._plan.model, 0)
    check_kept(result, tmp_path, digits, lambda x: model.features(x, torch.float64).numpy())


def test_the_outputs_of_a_frozen_body_are_features_on_the_network_too(digits: dict[str, Path], tmp_path, monkeypatch):
    """Features are the body's outputs with their length divided away, and a constant one. Nothing is dropped."""
    settings = {"method": {"name": "analytic"}, "model": {"name": ON_BODY}}
    result = attune.simulate(digits, settings=settings, keep="personalized", progress=False)
    spec = result._plan.model
    assert spec.body_digest and spec.options["sharpness"] == 8
    body = build(spec, 0).body.eval()

    def features(x: torch.Tensor) -> np.ndarray:
        f = body(x).double().numpy()
        return np.hstack([f / np.linalg.norm(f, axis=1, keepdims=True), np.ones((len(f), 1))])

    saved = check_kept(result, tmp_path / "saved", digits, features)
    first, *_ = digits
    kept = Model.load(saved / first, allow_models=[ON_BODY])
    assert portable.export(kept, tmp_path / "model.pt2") <= portable.TOLERANCE
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    network = host(tmp_path, digits, settings, keep="personalized", allow_models=(ON_BODY,))
    assert network.digests == result.digests
    assert all(read_info(saved / name).files == read_info(network.model(name)).files for name in digits)


def test_tokens_have_a_closed_form_on_a_body():
    """Their ordinary models see what enters the head, as with any frozen body."""
    draws, data = np.random.default_rng(0), {}
    for site in range(4):
        y = draws.integers(3, size=60)
        data[f"s{site}"] = ((draws.integers(10, size=(60, 6)) + 10 * y[:, None]).astype("i8"), y)
    settings = {
        "method": {"name": "analytic"},
        "model": {"name": "attune.tests.e2e.adapted:of_tokens"},
        "data": {"kind": "tokens"},
    }
    rows = last(attune.simulate(data, settings=settings, baseline="alone", progress=False))
    assert np.mean([row.accuracy_before for row in rows]) > 0.9
    assert np.mean([row.accuracy_alone for row in rows]) > 0.9


def test_a_body_drops_nothing_whatever_the_mode():
    spec = default_spec("images", (8, 8, 1), 3, 0, None, {})
    model, x = closed_form(spec), torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = model.features(x)
    assert torch.equal(model.train().features(x), before) and before.count_nonzero() > 5
    assert torch.equal(model.features(x[:2]), before[:2]), "statistics are those of the body, not of the batch"


def test_a_body_that_cannot_be_used_is_refused():
    spec = default_spec("images", (8, 8, 1), 3, 0, "", {})
    for width, classes, said in ((4001, 3, "4,000 features"), (8, 1001, "1,000 outputs")):
        with pytest.raises(SettingError, match=said):
            ClosedFormOnBody(msgspec.structs.replace(spec, classes=classes), nn.Linear(2, width), width)
    with pytest.raises(SettingError, match="every token has a label"):
        ClosedFormOnBody(msgspec.structs.replace(spec, per_position=True), nn.Linear(2, 8), 8)
    with pytest.raises(SettingError, match=r"gives \(5, 3\) numbers, and 8 for each sample were announced"):
        ClosedFormOnBody(spec, nn.Linear(2, 3), 8).features(torch.rand(5, 2))


def test_what_devices_keep_is_better_than_the_common_model_and_alone(digits: dict[str, Path]):
    result = attune.simulate(digits, settings={"method": {"name": "analytic"}}, baseline="alone", progress=False)
    rows = last(result)
    kept, alone = (np.mean([getattr(row, name) for row in rows]) for name in ("accuracy_kept", "accuracy_alone"))
    assert kept >= alone > 0.9
    assert all({"personalized", "alone"} <= row.likelihoods.keys() for row in rows)
    for kept in result._outcome.results.values():
        assert kept.weights["personalized"] > 0
        assert 0 < kept.validation_samples <= kept.samples, "before, the device said that nothing could weigh its models"


def test_numbers_whose_scales_are_a_sum_behind_masks_too(numbers: dict[str, Path]):
    """The scales come from one masked sum, which the devices have made before round 1, and the weights from another."""
    plain, masked = (attune.simulate(numbers, settings=of, baseline="none", progress=False) for of in (ANALYTIC, MASKED))
    assert masked._plan.scale is not None and masked._plan.targets is not None
    for one, other in zip(last(plain), last(masked), strict=True):
        assert one.accuracy_before == pytest.approx(other.accuracy_before, abs=1e-6)
        assert one.accuracy_before > 0.5
    assert np.mean([row.accuracy_before for row in last(plain)]) > 0.7, "the relation is no line"


def test_labels_that_may_go_together(labelled: dict[str, Path]):
    rows = last(attune.simulate(labelled, settings=ANALYTIC, baseline="alone", progress=False))
    assert np.mean([row.accuracy_before for row in rows]) > 0.85
    assert np.mean([row.accuracy_common for row in rows]) > 0.85


def test_a_saved_model_predicts_alone(digits: dict[str, Path], tmp_path: Path):
    result = attune.simulate(digits, settings=ANALYTIC, baseline="alone", progress=False)
    saved = result.save(tmp_path / "saved") / "models"
    for name, path in digits.items():
        accuracy = Model.load(saved / name).evaluate(load_shard(path))[0]
        assert accuracy == pytest.approx(next(row.accuracy_kept for row in last(result) if row.client == name))
        assert read_info(saved / name).files.keys() & {"forest.safetensors", "logistic.safetensors"}


def test_the_operator_sees_whose_labels_contradict_all_others(tmp_path: Path):
    images, labels = load_digits(return_X_y=True)
    data = {f"s{n}": (images[n::20].reshape(-1, 8, 8, 1).astype("f4") / 16, labels[n::20]) for n in range(6)}
    data["s2"] = (data["s2"][0], 9 - data["s2"][1])
    out = attune.simulate(data, settings=ANALYTIC, progress=False).save(tmp_path / "saved")
    with (out / "left_out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["client"] for row in rows} == set(data)
    misfits = [float(row["misfit"]) for row in rows]
    assert rows[0]["client"] == "s2" and misfits == sorted(misfits, reverse=True)
    assert misfits[0] > 1 > 0.8 > misfits[1]
    with (out / "worth.csv").open(newline="") as file:
        worths = list(csv.DictReader(file))
    assert worths[-1]["client"] == "s2" and float(worths[-1]["high"]) < 0  # the others would do better without it
    assert all(float(row["worth"]) > 0 for row in worths[:-1]) and {row["client"] for row in worths} == set(data)
    assert all(0 < int(row["samples"]) < 90 for row in rows)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"round": {"mode": "buffered"}}, "buffered"),
        ({"round": {"encoding": "bf16"}}, "bf16"),
        ({"round": {"encodings": {"attended": "int8"}}}, "int8"),
        ({"privacy": {"secure_aggregation": True, "secure_devices": 4}}, "sums over samples have at least 5 devices"),
        ({"privacy": {"secure_aggregation": True}}, "round.min_clients = 4: sums have at least 5 devices"),
        ({"privacy": {"unit": "example", "epsilon": 2.0}}, "its sums have no noise"),
        ({"privacy": {"unit": "client", "epsilon": 2.0}}, "analytic"),
        ({"model": {"name": "dnn"}}, "'strength'"),
        ({"model": {"features": 4001}}, "model.features"),
        ({"data": {"classes": [str(number) for number in range(1001)]}}, "at most 4,000 features and 1,000 outputs"),
        ({"server": {"max_update_norm": 3.0}}, "norm-limit"),
        ({"method": {"name": "analytic", "robust": "median"}}, "robust"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_by_name(clouds: dict[str, Path], settings: dict[str, Any], said: str):
    with pytest.raises(AttuneError, match=said):
        attune.simulate(clouds, settings={"method": {"name": "analytic"}, **settings}, progress=False)


def test_columns_that_each_device_scales_by_itself_are_refused(clouds: dict[str, Path]):
    """A sum over differently scaled columns means nothing: the common model fell from 93.9 to 74.6 in a trial."""
    with pytest.raises(AttuneError, match="adds up numbers of all devices"):
        attune.simulate(clouds, settings=ANALYTIC, progress=False)


def test_tables_of_sites_whose_columns_are_scaled_together(tmp_path: Path):
    """A site's own table has no meta.json: --standardise federation says it."""
    draws = np.random.default_rng(3)
    tables = {}
    for site in range(5):
        age, dose = draws.normal(60, 10, 80), draws.normal(5 + site, 2, 80)
        rows = [f"{a:.2f},{d:.2f},{'yes' if a / 10 + d > 11 + site else 'no'}" for a, d in zip(age, dose, strict=True)]
        tables[f"s{site}"] = tmp_path / f"s{site}.csv"
        tables[f"s{site}"].write_text("\n".join(["age,dose,event", *rows]))
    result = attune.simulate(tables, settings=ANALYTIC, label="event", table={"standardise": "federation"}, progress=False)
    assert result._plan.scale is not None and result._plan.column_names == ["age", "dose"]
    assert np.mean([row.accuracy_before for row in last(result)]) > 0.8


# --- behind masks: what devices learn is their sum, what the server learns is no more


def cut_at(folder: Path, cuts: list[int]) -> dict[str, Path]:
    """Write the same table of 120 rows with two classes, cut at these rows."""
    draws = np.random.default_rng(4)
    x = draws.normal(size=(120, 3)).astype("f4")
    y = (np.sin(2 * x[:, 0]) + x[:, 1] > 0).astype("i8")
    shards = {}
    for site, (start, end) in enumerate(pairwise([0, *cuts, 120])):
        place = folder / f"s{site}"
        place.mkdir(parents=True)
        np.savez(place / "train.npz", x=x[start:end], y=y[start:end])
        np.savez(place / "test.npz", x=x[:20], y=y[:20])
        (place / "meta.json").write_bytes(msgspec.json.encode({"classes": [0, 1], "standardise": False}))
        shards[place.name] = place
    return shards


def served(home: Path, key: str) -> dict[str, torch.Tensor]:
    """Return what the server keeps under a key of its vault after the last round."""
    return read_tensors(max((home / "server" / "state").glob(f"attended.{key}.*.safetensors")))


@examples(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(8, 112), min_size=4, max_size=6, unique=True).map(sorted))
def test_the_sum_is_that_of_the_pooled_samples_for_any_split(cuts: list[int], tmp_path_factory: pytest.TempPathFactory):
    """Each device's numbers are exact to 2^-80, so what is left is the rounding of float64 in its own sums."""
    folder = tmp_path_factory.mktemp("split")
    shards = cut_at(folder, cuts)
    given_settings = {**MASKED, "model": {"features": 60, "linear": True}}
    result = attune.simulate(shards, settings=given_settings, baseline="none", home=folder / "home", progress=False)
    model = build(result._plan.model, 0)
    whole = [load_shard(path) for path in shards.values()]
    Z = model.features(torch.from_numpy(np.concatenate([shard.train_x for shard in whole])), torch.float64).numpy()
    T = np.eye(2)[np.concatenate([shard.train_y for shard in whole])]
    total = served(folder / "home", "total")
    np.testing.assert_allclose(total["cross"].numpy(), Z.T @ T, rtol=0, atol=1e-12)
    blocks = [slice(0, 61), slice(61, Z.shape[1])]  # random features, and the columns themselves
    gram = np.concatenate([(Z[:, at].T @ Z[:, at])[np.triu_indices(at.stop - at.start)] for at in blocks])
    np.testing.assert_allclose(total["gram"].numpy(), gram, rtol=0, atol=1e-12)
    for at, gamma in zip(blocks, total["gamma"].tolist(), strict=True):
        pooled = np.linalg.solve(Z[:, at].T @ Z[:, at] + gamma * np.eye(at.stop - at.start), Z[:, at].T @ T).T
        np.testing.assert_allclose(total[WEIGHT][:, at].numpy(), pooled, rtol=0, atol=1e-9)


def test_devices_keep_what_they_keep_without_masks(five: dict[str, Path], tmp_path: Path):
    """The device takes its own sums out of the whole, as the server does in plain mode, and the fleet chooses the same."""
    kept = {}
    for name, of in (("plain", ANALYTIC), ("masked", MASKED)):
        result: Any = attune.simulate(five, settings=of, keep="personalized", progress=False)
        saved = result.save(tmp_path / name) / "models"
        kept[name] = {site: Model.load(saved / site).tensors for site in five}
    assert result.status["privacy"]["clipping"] is None, "sums are not clipped"
    assert not (tmp_path / "masked" / "worth.csv").exists(), "the sums without a site would tell that site's"
    lines = write_state(result._outcome.snapshot, result._state.storage.blobs, tmp_path)
    assert [line for line in lines if line.startswith("no worth.csv: with privacy.secure_aggregation")]
    for site in five:
        plain, masked = kept["plain"][site], kept["masked"][site]
        assert float(plain["strength"]) == float(masked["strength"])
        torch.testing.assert_close(masked[WEIGHT], plain[WEIGHT], rtol=0, atol=1e-10)
        assert not masked["gram"].any() and not masked["cross"].any()


def test_a_device_that_is_not_in_the_sum_takes_nothing_out(five: dict[str, Path], tmp_path: Path):
    """One device of six is not drawn in round 1. It is served the sum of the others, in which it will never be."""
    shutil.copytree(five["shard0"], tmp_path / "sixth")
    more, drawn = {**five, "sixth": tmp_path / "sixth"}, {"clients": 5, "over_selection": 0.0}
    of = {**MASKED, "round": drawn}
    result = attune.simulate(more, settings=of, baseline="none", home=tmp_path / "home", progress=False)
    state = tmp_path / "home" / "server" / "state"
    counted = {path.name.split(".")[1] for path in state.glob("attended.*sums*")}
    assert len(counted) == 5 and len(last(result)) == 6
    members, total = served(tmp_path / "home", "members"), served(tmp_path / "home", "total")
    assert (float(members["counted"]), float(total["counted"])) == (1.0, 0.0)
    assert all(torch.equal(members[name], total[name]) for name in total if name != "counted")


def test_a_device_that_lies_spoils_the_sum_for_good(five: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Expect an end with what devices fit alone: all have been in their one sum, and it does not tell who lied."""
    lies = iter([-10.0, *[1.0] * 100])

    def given(Z_ND: torch.Tensor, T_NC: torch.Tensor, sizes: list[int]) -> dict[str, torch.Tensor]:
        made = sums_of(Z_ND, T_NC, sizes)
        return {**made, "cross": next(lies) * made["cross"]}

    monkeypatch.setattr(sums, "sums_of", given)
    result = attune.simulate(five, settings=MASKED, baseline="alone", home=tmp_path / "home", progress=False)
    assert not list((tmp_path / "home" / "server" / "state").glob("attended.total*"))
    assert result.status["round"] == 2
    assert all(row.accuracy_kept == row.accuracy_alone for row in last(result))
