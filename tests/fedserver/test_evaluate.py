"""`attune.evaluate`: which models can be evaluated elsewhere, and that sites score a folder as `fedclient evaluate` does."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

import attune
from attune.common.errors import HomeMismatch, NoModel, SettingError
from attune.common.given_model import GivenModel, read_network
from attune.fedserver.core.planning import resolve
from attune.fedserver.evaluate import evaluate
from attune.fedserver.lab.given import GIVEN, read_given, store_given
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.folder import FolderBlobs
from tests.e2e.harness import tabular_shard
from tests.e2e.hosted import host

SETTINGS = {"train.local_epochs": 2, "round.analytic": "off"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shards")
    return {name: tabular_shard(folder / name, seed) for seed, name in enumerate(("kiel", "lund", "oslo"))}


@pytest.fixture(scope="module")
def trained(shards: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model of one site, which has its scale."""
    members = {name: shards[name] for name in ("kiel", "lund")}
    folder = tmp_path_factory.mktemp("trained")
    settings = {
        "shards": members,
        "method": "fedper",
        "model": "dnn",
        "rounds": 2,
        "settings": SETTINGS,
        "home": folder / "home",
    }
    return attune.simulate(**settings, keep="personalized", progress=False).save(folder / "result") / "models" / "kiel"


def described(folder: Path, **changes: object) -> GivenModel:
    return msgspec.json.decode(msgspec.json.encode(json.loads((folder / "model.json").read_bytes()) | changes), type=GivenModel)


def test_each_site_scores_a_folder_as_fedclient_evaluate_does(
    shards: dict[str, Path], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attune.fedclient.data.shard import load_shard
    from attune.fedclient.model.artifact import Model

    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    ask = partial(
        evaluate, trained, host="127.0.0.1", port=0, dashboard="off", join_uses=3, min_clients=3, say=lambda line: None
    )
    hosted = host(tmp_path, shards, {}, baseline="alone", serve=lambda home: ask(home=home))
    snapshot, model = hosted.home.snapshot(), Model.load(trained)
    scores = {row.client: row.accuracy_kept for row in snapshot.rows}
    assert scores == {name: pytest.approx(model.evaluate(load_shard(shards[name]))[0]) for name in shards}
    assert {(row.work, row.kept) for row in snapshot.rows} == {("evaluate", "common")}
    assert all(row.accuracy_alone is not None and row.kept_better_than_alone is not None for row in snapshot.rows)
    kept = Model.load(hosted.model("oslo"))
    assert all(tensor.equal(model.tensors[name]) for name, tensor in kept.tensors.items())


def test_what_cannot_be_evaluated_elsewhere_is_refused_by_name(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="graph of ONNX"):
        read_network(tmp_path / "model.onnx")
    with pytest.raises(NoModel, match="no finished model"):
        read_network(tmp_path)
    with pytest.raises(SettingError, match="hold training samples"):
        described(trained, kept="alone", weights={"forest": 1.0}).check()
    with pytest.raises(SettingError, match="predicts by its own samples"):
        described(trained, method="fedtp+knn", method_options={}).check()
    with pytest.raises(SettingError, match="newer version"):
        described(trained, format=9).check()
    blend = described(trained, kept="alone", weights={"forest": 0.6, "common": 0.1, "personalized": 0.3})
    assert (blend.network, blend.left_out) == ("personalized", "common, forest")
    home = trained.parents[2] / "home" / "server"
    with pytest.raises(NoModel, match=r"fedper has no common model: devices keep head.* more tensors"):
        evaluate(home=home)
    with pytest.raises(HomeMismatch, match="holds no federation"):
        evaluate(run="second", home=home)
    with pytest.raises(SettingError, match="section data follows"):
        evaluate(trained, settings={"data.task": "regression"}, home=tmp_path / "home")


@pytest.mark.parametrize(("name", "value"), [("unit", "example"), ("unit", "client"), ("secure_aggregation", True)])
def test_an_evaluation_excludes_noise_and_masks_of_training(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=r"round\.given cannot be combined with privacy"):
        resolve({"method": {"name": "fedavg"}, "round": {"given": "sha256:0"}, "privacy": {name: value, "epsilon": 1.0}})


def test_a_stored_model_is_read_only_as_it_was_given(trained: Path, tmp_path: Path) -> None:
    blobs, (given, tensors) = FolderBlobs(tmp_path), read_network(trained)
    digest = store_given(blobs, given, tensors)
    assert read_given(blobs, digest).settings(digest)["round"] == {"given": digest}
    first = next(iter(tensors))
    with pytest.raises(SettingError, match="not those of the model"):
        store_given(blobs, given, {first: tensors[first]})
    with pytest.raises(SettingError, match="not those of the model"):
        store_given(blobs, given, {**tensors, first: tensors[first] * float("nan")})
    path = next(tmp_path.glob(f"{GIVEN}*.json"))
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1'))
    with pytest.raises(Damaged, match="give it again"):
        read_given(FolderBlobs(tmp_path), digest)
