"""`attune.simulate` for its callers: arguments, results, refusals, and that no file is opened."""

import ast
import csv
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import attune
from attune.common import aio
from attune.common.errors import FederationFailed, SettingError, ShapeMismatch, ShardError
from attune.common.plan import ModelSpec
from attune.common.statistics import wilson
from attune.fedclient.data.shard import load_shard
from attune.simulation.arguments import data_by_name, read_shards

ROOT = Path(__file__).parents[2]
QUICK = {"train.local_epochs": 1, "model.name": "mlr"}


def cloud(seed: int, samples: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return three separate clouds of four features."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    return (np.eye(4)[y] * 9 + rng.normal(size=(samples, 4))).astype(np.float32), y


CLOUDS = {f"site{n}": cloud(n, 40 + n) for n in range(3)}


@pytest.fixture
def nothing_opens(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Refuse to open files and databases that are files, and to make folders, from the call on."""
    connect = sqlite3.connect

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"opened by a federation in memory: {arguments}")

    def in_memory(place: str, **more: Any) -> sqlite3.Connection:
        return connect(place, **more) if place == ":memory:" else refuse(place)

    def begin() -> None:
        monkeypatch.setattr("sqlite3.connect", in_memory)
        names = ("builtins.open", "io.open", "os.open", "os.mkdir", "os.rename", "os.link", "pathlib.Path.open")
        for target in names:
            monkeypatch.setattr(target, refuse)

    return begin


def test_without_a_home_nothing_is_opened_or_written(nothing_opens: Callable[[], None]) -> None:
    expected = attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK)  # run once before, because imports open files
    nothing_opens()
    found = attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK)
    assert found.digests == expected.digests


def test_the_package_imports_neither_grpc_nor_sqlite() -> None:
    imported = set()
    for path in (ROOT / "simulation").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert "attune" in imported
    assert not imported & {"grpc", "sqlite3", "google"}


def test_the_table_has_a_row_for_each_device() -> None:
    result = attune.simulate(CLOUDS, "fedper", "dnn", rounds=2, settings={"train.local_epochs": 1}, baseline="local")
    table = result.table()
    assert [row.device for row in table] == ["site0", "site1", "site2"]
    assert len(table) == 3
    clients = {client["name"]: client for client in result.status["clients"]}
    for row in table:
        client = clients[row.device]
        assert row.local == client["accuracy_local"] is not None
        assert row.common is None, "fedper's heads never leave a device: there is no common model"
        assert row.personalized == row.accuracy == client["accuracy"] is not None
        assert (row.kept, row.served) == (client["accuracy_kept"], client["accuracy_before"])
        assert row.interval == wilson(row.personalized, client["test_samples"])
        assert row.verdict in ("better", "worse", "unclear")
    assert table.mean("personalized") == pytest.approx(sum(row.personalized for row in table) / 3)
    lines = str(table).splitlines()
    scores = ["local", "personalized", "accuracy", "kept", "served", "constant"]
    assert lines[0].split() == ["device", "samples", *scores, "interval", "verdict", "probably", "keeps"]
    assert [line.split()[0] for line in lines[1:]] == ["site0", "site1", "site2", "mean"]


def test_the_status_is_that_of_a_federation_that_is_done() -> None:
    status = attune.simulate(CLOUDS, "fedavg", rounds=2, seed=4, settings=QUICK).status
    assert (status["state"], status["round"], status["rounds"], status["method"]) == ("done", 2, 2, "fedavg")
    assert [client["samples"] for client in status["clients"]] == [30, 31, 32], "a quarter is held out for testing"
    json.dumps(status)


def test_models_predict() -> None:
    result = attune.simulate(CLOUDS, "fedavg", rounds=10, settings=QUICK | {"train.lr": 0.3})
    x, y = cloud(17)
    assert np.mean(np.array(result.model("site1").predict(x)) == y) > 0.9
    with pytest.raises(SettingError, match="site1"):
        result.model("site11")


def test_what_is_saved_is_what_an_export_has_and_the_models(tmp_path: Path) -> None:
    from attune.fedclient.model.artifact import Model

    result = attune.simulate(CLOUDS, "fedmcsa", rounds=2, settings=QUICK)
    out = result.save(tmp_path / "out")
    assert {path.name for path in out.iterdir()} >= {"metrics.csv", "summary.json", "plan.json", "status.json", "table.csv"}
    with (out / "table.csv").open() as file:
        assert [row["device"] for row in csv.DictReader(file)] == ["site0", "site1", "site2"]
    x, _ = cloud(17)
    for name in CLOUDS:
        assert Model.load(out / "models" / name).predict(x) == result.model(name).predict(x)


def test_pictures_are_shown_or_written(tmp_path: Path) -> None:
    result = attune.simulate(CLOUDS, "fedmcsa", "dnn", rounds=2, settings={"train.local_epochs": 1})
    drawn = result.plot()
    assert drawn._repr_html_().count("<img") >= 3
    page = drawn.save(tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    assert {"accuracy.png", "attention.png"} <= {path.name for path in page.parent.iterdir()}
    assert result.plot("attention")._repr_html_().count("<img") == 1
    with pytest.raises(SettingError, match="fedmcsa has no embeddings"):
        result.plot("embeddings")


def test_sampling_and_settings_by_section() -> None:
    by_name = attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK | {"round.clients": 1})
    by_section = attune.simulate(
        CLOUDS,
        "fedavg",
        settings={"round": {"clients": 1, "rounds": 2}, "train": {"local_epochs": 1}, "model": {"name": "mlr"}},
    )
    assert by_name.digests == by_section.digests
    assert by_name.digests != attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK).digests


def test_the_server_computes_on_the_processor_that_its_setting_names() -> None:
    with pytest.raises(SettingError, match=r"server\.device cuda:99: this machine shows \d+ CUDA devices"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK | {"server.device": "cuda:99"})


# --- shards


def test_arrays_are_the_same_as_a_folder_with_them(tmp_path: Path) -> None:
    x, y = CLOUDS["site0"]
    for name, parts in {"whole": {"train": (x, y)}, "parted": {"train": (x[:30], y[:30]), "test": (x[30:], y[30:])}}.items():
        (tmp_path / name).mkdir()
        for part, (some_x, some_y) in parts.items():
            np.savez(tmp_path / name / f"{part}.npz", x=some_x, y=some_y)
    arrays = read_shards(data_by_name({"whole": (x, y), "parted": (x[:30], y[:30], x[30:], y[30:])}))
    folders = read_shards(data_by_name(str(tmp_path / "*")))
    assert list(folders) == ["parted", "whole"]
    for name in arrays:
        one, other = arrays[name].load(), load_shard(tmp_path / name)
        for field in ("train_x", "train_y", "test_x", "test_y"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), (name, field)
        assert arrays[name].profile == folders[name].profile


def test_torch_datasets_of_images_have_their_channels_first() -> None:
    images = torch.rand(12, 3, 5, 4)
    labels = torch.arange(12) % 2
    train, test = TensorDataset(images[:8], labels[:8]), TensorDataset(images[8:], labels[8:])
    shard = read_shards(data_by_name({"a": (train, test)}))["a"].load()
    assert shard.kind == "images"
    assert np.array_equal(shard.train_x, images[:8].permute(0, 2, 3, 1).numpy())
    assert np.array_equal(shard.test_y, labels[8:].numpy())
    alone = read_shards(data_by_name({"a": train}))["a"].load()
    assert (len(alone.train_x), len(alone.test_x)) == (6, 2)


@pytest.mark.parametrize("wrong", [{}, {"a": 3}, {"a": (1, 2, 3)}, {"a": {"x": [1]}}, {"a": TensorDataset(torch.rand(3, 2))}])
def test_what_is_no_data_is_refused(wrong: Any) -> None:
    with pytest.raises(ShardError):
        read_shards(data_by_name(wrong))


def test_an_impossible_name_is_refused() -> None:
    with pytest.raises(SettingError, match="cannot name a device"):
        read_shards(data_by_name({"../up": CLOUDS["site0"]}))


# --- models


class Own(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head = nn.Linear(spec.shape[0], spec.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_a_model_is_a_name_a_factory_or_a_module() -> None:
    settings = {"train.local_epochs": 1}
    spec = ModelSpec("own", "tabular", (4,), 3)
    by_function = attune.simulate(CLOUDS, "fedavg", model=lambda found: Own(found), rounds=1, settings=settings)
    again = attune.simulate(CLOUDS, "fedavg", model=lambda found: Own(found), rounds=1, settings=settings)
    assert by_function.digests == again.digests
    module = Own(spec)
    before = [value.clone() for value in module.state_dict().values()]
    by_module = attune.simulate(CLOUDS, "fedavg", model=module, rounds=1, settings=settings)
    assert by_module.digests != by_function.digests, "it has weights of its own to start from"
    assert all(one.equal(other) for one, other in zip(before, module.state_dict().values(), strict=True))
    assert by_module.model("site0").predict(CLOUDS["site0"][0])


@pytest.mark.parametrize(("model", "said"), [(3, "model is a int"), ("vit", "vit does not take tabular")])
def test_what_is_no_model_for_the_data_is_refused(model: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        attune.simulate(CLOUDS, "fedavg", model=model, rounds=1)


# --- life


def test_it_runs_inside_a_running_event_loop() -> None:
    async def notebook() -> dict[str, str]:
        return attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK).digests

    assert aio.run(notebook()) == attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK).digests


def test_whoever_watches_hears_every_step_up_to_the_end() -> None:
    heard: list[float] = []
    attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK | {"round.evaluate_every": 1}, progress=heard.append)
    assert heard == [pytest.approx(n / 12) for n in range(1, 13)], "three devices train and evaluate in each of two rounds"


def test_an_interruption_ends_everything_and_is_raised() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT by default
    try:
        _interrupted()
    finally:
        signal.signal(signal.SIGINT, usual)


def _interrupted() -> None:
    before = set(threading.enumerate())

    def interrupt(share: float) -> None:
        if share > 0.5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        attune.simulate(CLOUDS, "fedavg", rounds=50, settings=QUICK, progress=interrupt)
    assert set(threading.enumerate()) <= before


def test_a_device_that_cannot_train_ends_it_with_its_reason() -> None:
    with pytest.raises(FederationFailed, match=r"site\d: the loss or the weights are not finite"):
        attune.simulate(
            CLOUDS, "fedavg", rounds=2, settings=QUICK | {"train.lr": 1e38, "train.clip_norm": 0.0, "train.batch_size": 4}
        )


def test_a_misspelt_setting_is_named() -> None:
    with pytest.raises(SettingError, match="sigma"):
        attune.simulate(CLOUDS, "fedmcsa", settings={"method.sigmma": 5})


@pytest.mark.parametrize("odd", [1, 2])
def test_shards_that_are_not_alike_are_named_and_nothing_waits_for_others(odd: int) -> None:
    """Expect that the majority refuses one of three; with two, there is no majority."""
    alike = {name: CLOUDS[name] for name in list(CLOUDS)[: 3 - odd]}
    x = np.zeros((8, 9), "f4")
    with pytest.raises(ShapeMismatch, match=r"odd.*\(9,\)" if odd == 1 else r"\(9,\)"):
        attune.simulate(alike | {"odd": (x, np.arange(8) % 2)}, "fedavg", rounds=1)
