"""Federations whose devices fit ordinary models: what is kept, told, saved, exported, and the same over the network."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import attune
from attune.common.metrics import NETWORKS
from attune.common.plan import ModelSpec
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import artifact, portable
from attune.fedclient.model.artifact import Model, read_info
from attune.fedserver.core.records import Report
from tests.e2e.hosted import host

QUICK = {"train.local_epochs": 1}


def sites(task: str = "classes", count: int = 3, samples: int = 40) -> dict[str, tuple[Any, ...]]:
    """Return tables whose classes ordinary models learn from few samples."""
    draws, made = np.random.default_rng(0), {}
    for number in range(count):
        x = draws.normal(size=(samples + 20, 4)).astype("float32")
        score = x[:, 0] - 2 * x[:, 1]
        y: Any = (score > 0).astype(int)
        if task == "regression":
            y = score + draws.normal(size=len(x)) / 10
        elif task == "multilabel":
            y = np.stack([score > 0, x[:, 2] > 0], axis=1).astype(int)
        elif task == "survival":
            y = np.stack([np.exp(-score), draws.integers(0, 2, len(x))], axis=1)
        made[f"site{number}"] = (x[:samples], y[:samples], x[samples:], y[samples:])
    return made


@pytest.fixture(scope="module")
def result() -> Any:
    return attune.simulate(sites(), "fedper", "dnn", rounds=2, settings=QUICK, baseline="alone", progress=False)


def test_what_is_kept_has_fitted_models_and_is_compared_with_the_best_of_them(result: Any) -> None:
    for client in result.status["clients"]:
        assert client["accuracy_alone"] >= 0.75 and client["accuracy_kept"] >= client["accuracy_alone"] - 0.1
        assert client["kept_better_than_alone"] is not None and client["likelihood_alone"] is not None
        weights = result.model(client["name"]).info.weights
        assert sum(weight for name, weight in weights.items() if name not in NETWORKS) > 0.3
        assert sum(weights.values()) == pytest.approx(1) and min(weights.values()) >= 0.02


def test_the_server_learns_weights_of_fitted_models_and_no_more(result: Any) -> None:
    last = [row for row in result._outcome.snapshot.rows if row.work == "evaluate"]
    assert all(isinstance(row, Report) and set(row.fitted) == {"logistic", "nearest-1", "nearest-3", "forest"} for row in last)
    assert all(sum(row.fitted.values()) == pytest.approx(1) for row in last)


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_other_tasks_blend_fitted_models_too(task: str) -> None:
    found = attune.simulate(sites(task), "fedavg", "mlr", rounds=2, task=task, settings=QUICK, baseline="alone", progress=False)
    names = set().union(*(found.model(name).info.weights for name in sites()))
    assert ("ridge" if task == "regression" else "logistic") in names
    for client in found.status["clients"]:
        assert client["accuracy_alone"] > 0.5 and client["accuracy_kept"] > client["accuracy_alone"] - 0.1


def test_in_survival_the_cox_model_alone_is_a_rival_by_its_c_index_and_no_member() -> None:
    found = attune.simulate(
        sites("survival"), "fedavg", "mlr", rounds=1, task="survival", settings=QUICK, baseline="alone", progress=False
    )
    for client in found.status["clients"]:
        assert client["accuracy_alone"] > 0.8
        assert set(found.model(client["name"]).info.weights) <= set(NETWORKS)


def test_devices_with_few_samples_take_the_weights_of_the_others() -> None:
    members = sites() | {"tiny": tuple(part[:4] for part in sites()["site0"])}
    found = attune.simulate(members, "fedavg", "mlr", rounds=2, settings=QUICK, baseline="alone", progress=False)
    tiny, info = next(c for c in found.status["clients"] if c["name"] == "tiny"), found.model("tiny").info
    assert tiny["accuracy_alone"] is not None and tiny["likelihood_alone"] is None
    assert set(info.weights) - set(NETWORKS) and sum(info.weights.values()) == pytest.approx(1)


def test_without_a_baseline_and_for_tokens_nothing_is_fitted(result: Any) -> None:
    plain = attune.simulate(sites(), "fedper", "dnn", rounds=2, settings=QUICK, baseline="none", progress=False)
    assert plain.digests == result.digests, "fitted models change nothing that is trained or shared"
    assert all(client["accuracy_alone"] is None for client in plain.status["clients"])
    draws = np.random.default_rng(0)
    texts = {f"t{n}": (draws.integers(0, 5, (24, 6)), draws.integers(0, 2, 24)) for n in range(2)}
    settings = QUICK | {"data.kind": "tokens"}
    tokens = attune.simulate(texts, "fedavg", "lstm", rounds=1, settings=settings, baseline="alone", progress=False)
    assert all(client["accuracy_alone"] is None for client in tokens.status["clients"])


def test_a_saved_model_says_that_it_holds_samples_and_exports_without_them(result: Any, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out") / "models" / "site0"
    x, saved = sites()["site0"][2], Model.load(folder)
    assert saved.predict(x) == result.model("site0").predict(x)
    assert saved.info.format == 2 and saved.info.contains_samples == [
        n for n in ("nearest-1", "nearest-3") if n in saved.members
    ]
    text = json.loads((folder / "model.json").read_text())
    assert text["contains_samples"] and text["weights"].keys() == saved.members.keys()
    without = saved.without_samples()
    assert not any("nearest" in name for name in without.members) and without.info.contains_samples == []
    assert sum(member.weight for member in without.members.values()) == pytest.approx(1)
    assert portable.export(without, tmp_path / "small.pt2", x) <= portable.TOLERANCE
    assert portable.export(saved, tmp_path / "whole.pt2", x) <= portable.TOLERANCE
    rows = saved.members["nearest-1"].tensors["row"].numpy().tobytes()[:256] if "nearest-1" in saved.members else b"never"
    assert rows in (tmp_path / "whole.pt2").read_bytes() and rows not in (tmp_path / "small.pt2").read_bytes()


def test_export_says_what_it_leaves_out(result: Any, tmp_path: Path) -> None:
    from attune.fedclient import cli

    home = tmp_path / "home"
    (home / "model").parent.mkdir(parents=True)
    artifact.save(home / "model", *artifact_of(result, "site0"))
    (home / "device.json").write_text('{"name": "site0", "server": "localhost:1", "shard": "x"}')
    out = CliRunner().invoke(cli.main, ["export", "--home", str(home), "--out", str(tmp_path / "m.pt2")])
    assert out.exit_code == 0, out.output
    assert "left out, because they hold training samples: nearest-1" in out.output
    kept = CliRunner().invoke(cli.main, ["export", "--home", str(home), "--out", str(tmp_path / "w.pt2"), "--with-samples"])
    assert kept.exit_code == 0 and "left out" not in kept.output
    said = CliRunner().invoke(cli.main, ["disclosed", "--home", str(home)])
    assert "holds training samples (nearest-1" in said.output


def artifact_of(result: Any, name: str) -> tuple[Any, Any]:
    model = result.model(name)
    return model.info, {member: each.tensors for member, each in model.members.items()}


def test_a_network_federation_ends_with_the_same_models(clouds: dict[str, Path], tmp_path, monkeypatch) -> None:
    settings = {"seed": 3, "round": {"rounds": 2}, "train": {"local_epochs": 1}, "method": {"name": "fedavg"}}
    simulated = attune.simulate(clouds, settings=settings, baseline="alone", progress=False)
    files = {name: read_info(simulated.save(tmp_path / "s") / "models" / name).files for name in clouds}
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "n"))
    hosted = host(tmp_path / "n", clouds, settings, baseline="alone")
    assert {name: read_info(hosted.model(name)).files for name in clouds} == files
    assert any("forest.safetensors" in of for of in files.values())
    for name, path in clouds.items():
        model = Model.load(hosted.model(name))
        assert model.evaluate(load_shard(path))[0] == pytest.approx(read_info(hosted.model(name)).accuracy)
        assert list((tmp_path / "n" / "devices" / name / "fitted").glob("*/*.safetensors"))


def frozen_words(spec: ModelSpec) -> nn.Module:
    """Return a head on the mean of frozen vectors of tokens."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(dim=1)

    words = nn.Embedding(spec.vocabulary, 6).requires_grad_(False)
    return nn.Sequential(OrderedDict(words=words, mean=Mean(), head=nn.Linear(6, spec.classes)))


def test_of_tokens_the_features_of_a_frozen_body_are_fitted(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    texts = {}
    for name in ("a", "b"):
        x = draws.integers(0, 8, (200, 5))
        y = (np.isin(x, [1, 2]).sum(axis=1) > np.isin(x, [5, 6]).sum(axis=1)).astype(int)
        texts[name] = (x[:120], y[:120], x[120:], y[120:])
    settings = QUICK | {"data.kind": "tokens"}
    found = attune.simulate(texts, "fedavg", frozen_words, rounds=1, settings=settings, baseline="alone", progress=False)
    for client in found.status["clients"]:
        assert client["accuracy_alone"] > 0.7
        model = found.model(client["name"])
        fitted = next(member for name, member in model.members.items() if name == "logistic")
        assert fitted.tensors["weight"].shape[1] == 6, "features of the body, not numbers of tokens"
        assert fitted.trainer.evaluate(fitted.tensors, *map(torch.from_numpy, texts[client["name"]][2:])) > 0.6


@pytest.mark.parametrize("unit", ["example", "client"])
def test_with_noise_fitted_models_stay_on_the_device_and_the_guarantee_names_them(unit: str, tmp_path: Path) -> None:
    privacy: dict[str, Any] = {"unit": unit, "insecure_seed": 1}
    if unit == "example":
        privacy |= {"epsilon": 4.0, "ranges": [[-4, 4]]}
    else:
        privacy |= {"epsilon": 50.0, "delta": 0.01, "devices": 3}
    settings = {"train": {"local_epochs": 1}, "privacy": privacy, "data": {"classes": [0, 1]}}
    given = {name: tuple(np.clip(part, -4, 4) if part.ndim == 2 else part for part in parts) for name, parts in sites().items()}
    found = attune.simulate(given, "fedavg", "mlr", rounds=2, settings=settings, baseline="alone", progress=False)
    info = found.model("site0").info
    fitted = set(info.weights) - set(NETWORKS)
    assert fitted and fitted <= set(info.privacy.finished)
