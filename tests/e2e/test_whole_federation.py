"""Five devices with two digits each, from the start to models of their own: processes, mutual TLS, the documented commands."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load

import attune
from attune.common.config import load_settings
from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli import cli as fedserver
from tests.e2e.harness import Federation, FederationAt, Process, digit_shards, run_to_the_end
from tests.pictures import check_pictures

ROUNDS = 8
SETTINGS = (f"round.rounds={ROUNDS}", "train.local_epochs=2", "train.lr=0.02")
FLAGS = tuple(word for setting in SETTINGS for word in ("--set", setting))


@dataclass
class Ended:
    """Finished federation."""

    federation: Federation
    shards: list[Path]
    devices: list[Process]

    @property
    def accuracy(self) -> dict[str, float]:
        return {client["name"]: client["accuracy"] for client in self.federation.status()["clients"]}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("digits"), 5, 100, 40)


@pytest.fixture(scope="module")
def fedtp(federation_at: FederationAt, shards: list[Path]) -> Ended:
    federation = federation_at("fedtp")
    _, devices = run_to_the_end(federation, shards, *FLAGS, device_flags=("--keep", "personalized"))
    return Ended(federation, shards, devices)


def evaluated(ended: Ended, shard: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.federation.command("fedclient", "evaluate", "--data", str(shard), "--json").stdout)
    return found


def test_status_has_every_promised_field(fedtp):
    status = fedtp.federation.status()
    expected = {"state": "done", "method": "fedtp", "round": ROUNDS, "rounds": ROUNDS, "running": False, "awaited": []}
    assert {key: status[key] for key in expected} == expected
    assert [client["name"] for client in status["clients"]] == [shard.name for shard in fedtp.shards]
    for client, shard in zip(status["clients"], fedtp.shards, strict=True):
        with np.load(shard / "train.npz") as train:
            assert client["samples"] == len(train["y"])
        assert client["state"] == "finished"
        assert 0 <= client["accuracy"] <= 1
    sizes = [len(np.load(shard / "test.npz")["y"]) for shard in fedtp.shards]
    values = [client["accuracy"] for client in status["clients"]]
    assert status["accuracy"]["mean_over_clients"] == pytest.approx(sum(values) / 5, abs=1e-12)
    assert status["accuracy"]["over_samples"] == pytest.approx(np.dot(values, sizes) / sum(sizes), abs=1e-12)
    assert "done: round 8/8 of fedtp" in fedtp.federation.command("fedserver", "status").stdout


def test_every_device_keeps_a_model_that_works_offline(fedtp, tmp_path):
    """Work without the server. A device keeps what it was served last, so its accuracy is that of the status."""
    for shard, process in zip(fedtp.shards, fedtp.devices, strict=True):
        place = fedtp.federation.model(shard)
        assert str(place) in process.text.splitlines()[-1]
        assert {path.name for path in place.iterdir()} == {"model.safetensors", "model.json", "signature.json"}
    shard, accuracy = fedtp.shards[0], fedtp.accuracy
    assert evaluated(fedtp, shard)["accuracy"] == pytest.approx(accuracy[shard.name], abs=1e-12)
    with np.load(shard / "test.npz") as test:
        x, y = test["x"], test["y"]
    np.savez(tmp_path / "new.npz", x=x)
    home = str(fedtp.federation.model(shard).parent)
    words = ("predict", "--data", str(tmp_path / "new.npz"), "--out", str(tmp_path / "labels.csv"), "--home", home)
    fedtp.federation.command("fedclient", *words)
    with (tmp_path / "labels.csv").open() as file:
        labels = [int(row["label"]) for row in csv.DictReader(file)]
    assert np.mean(np.array(labels) == y) == pytest.approx(accuracy[shard.name], abs=1e-12)


def test_export_is_readable_by_others_and_complete(fedtp):
    files = fedtp.federation.export()
    names = [shard.name for shard in fedtp.shards]
    assert {name for name in files if name.startswith("clients/")} == {f"clients/{name}.safetensors" for name in names}
    shared, server = load(files["shared.safetensors"]), load(files["server.safetensors"])
    own = [load(files[f"clients/{name}.safetensors"]) for name in names]
    kept = [load((fedtp.federation.model(shard) / "model.safetensors").read_bytes()) for shard in fedtp.shards]
    for mine, model in zip(own, kept, strict=True):
        assert mine.keys() | shared.keys() == model.keys()
        assert not mine.keys() & shared.keys()
        assert all(np.array_equal(model[name], tensor) for name, tensor in (mine | shared).items())
    assert any(not np.array_equal(own[0][name], own[1][name]) for name in own[0])
    assert any("embedding" in name for name in server)


def test_metrics_have_a_row_for_each_round_and_client(fedtp):
    rows = fedtp.federation.metrics()
    names = [shard.name for shard in fedtp.shards]
    trained = [row for row in rows if row["work"] == "train"]
    assert [(int(row["round"]), row["client"]) for row in trained] == [(r, n) for r in range(1, ROUNDS + 1) for n in names]
    evaluated = [row for row in rows if row["work"] == "evaluate"]
    assert [(int(row["round"]), row["client"]) for row in evaluated] == [(r, n) for r in (ROUNDS - 1, ROUNDS) for n in names]
    for row in trained:
        assert all(float(row[key]) > 0 for key in ("samples", "loss", "bytes_up", "seconds"))
        # The start of the last round was downloaded for the evaluation before it.
        assert (float(row["bytes_down"]) > 0) == (int(row["round"]) < ROUNDS)
        assert 0 <= float(row["accuracy_before"]) <= 1 and 0 <= float(row["accuracy_after"]) <= 1
    final = {row["client"]: float(row["accuracy_before"]) for row in evaluated if int(row["round"]) == ROUNDS}
    assert final == pytest.approx(fedtp.accuracy, abs=1e-12)


def test_the_summary_follows_from_the_metrics(fedtp):
    files = fedtp.federation.export()
    summary = json.loads(files["summary.json"])
    rows = list(csv.DictReader(files["metrics.csv"].decode().splitlines()))
    mean = {
        state: np.mean([float(row["accuracy_before"]) for row in rows if (row["work"], int(row["round"])) == order])
        for state, order in {r: ("train", r + 1) for r in range(ROUNDS)}.items() | {ROUNDS: ("evaluate", ROUNDS)}.items()
    }
    assert {point["round"]: point["mean_over_clients"] for point in summary["curves"]["before"]} == pytest.approx(mean)
    assert all(point["whole"] and point["clients"] == 5 for point in summary["curves"]["before"])
    assert summary["fedmcsa"]["bmta"] == pytest.approx(max(mean.values()))
    assert summary["fedmcsa"]["evaluations"] == ROUNDS + 1
    final = fedtp.federation.status()["accuracy"]["over_samples"]
    assert summary["fedtp"]["mean"] == pytest.approx(final), "of the last 2 of 8 rounds, every fifth and the end: the end"
    assert {client["name"]: client["accuracy"] for client in summary["clients"]} == fedtp.accuracy


def draw(command: click.Command, *words: str) -> None:
    """Draw in this process, because loading matplotlib takes a second in each."""
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_both_commands_draw_pictures(fedtp, tmp_path):
    status = fedtp.federation.status()
    draw(fedserver, "plot", "--home", str(fedtp.federation.home), "--out", str(tmp_path / "server"))
    page = check_pictures(tmp_path / "server", {"accuracy", "clients"})
    assert page.row("the clients' own models, latest: over all test samples")[1] == f"{status['accuracy']['over_samples']:.4f}"
    shard = fedtp.shards[0]
    home = fedtp.federation.model(shard).parent
    draw(fedclient, "plot", "--data", str(shard), "--home", str(home), "--out", str(tmp_path / "device"))
    rows = check_pictures(tmp_path / "device", {"rollout", "confusion", "classes"}).rows
    right = sum(int(row[3]) for row in rows if row[0] == "fedtp" and len(row) == 6)
    assert right / len(np.load(shard / "test.npz")["y"]) == pytest.approx(fedtp.accuracy[shard.name])


def test_everyone_sees_whether_personalization_helps(fedtp):
    rows = {row["client"]: row for row in fedtp.federation.metrics() if row["work"] == "evaluate"}
    for client, shard, process in zip(fedtp.federation.status()["clients"], fedtp.shards, fedtp.devices, strict=True):
        assert client["accuracy"] > client["accuracy_common"] + 0.05, "on two classes of its own a stranger's model is no match"
        assert client["interval"][0] < client["accuracy"] < client["interval"][1] or client["accuracy"] == 1.0
        assert (client["kept"], client["accuracy_local"]) == ("personalized", None)
        row = rows[shard.name]
        assert (float(row["accuracy_common"]), row["kept"]) == (client["accuracy_common"], "personalized")
        process.wait_for(rf"^common        accuracy {client['accuracy_common']:.3f} \(")
        process.wait_for(r"^kept: the personalized model \(not chosen\)$")


def test_numbers_are_those_that_the_devices_said(fedtp):
    rows, final = {(row["work"], row["round"], row["client"]): row for row in fedtp.federation.metrics()}, fedtp.accuracy
    for shard, process in zip(fedtp.shards, fedtp.devices, strict=True):
        row = rows["train", "1", shard.name]
        process.wait_for(rf"^round 1  loss {float(row['loss']):.4g}  accuracy {float(row['accuracy_before']):.3f} -> ")
        process.wait_for(rf"^evaluated after round {ROUNDS}  accuracy {final[shard.name]:.3f}$")


def test_fedtp_beats_fedavg_on_every_device(fedtp):
    """Check the purpose of the system on digits with two classes for each device: same shards, rounds, seeds and settings."""
    members = {shard.name: shard for shard in fedtp.shards}
    fedavg = attune.simulate(members, "fedavg", settings=load_settings(None, SETTINGS, {}))
    ours = fedtp.accuracy
    assert ours.keys() == {row.device for row in fedavg.table()}
    assert all(ours[row.device] > row.accuracy for row in fedavg.table()), (ours, fedavg.table())
