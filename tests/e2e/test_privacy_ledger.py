"""Attacks on the ledger of a device's privacy, by real processes: kill -9 around the charge, copied homes, two processes."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from attune.fedserver.home import ServerHome
from tests.e2e.harness import Federation, tabular_shard
from tests.e2e.hosted import host

FLAGS = (
    *("--method", "fedavg", "--model", "mlr", "--rounds", "3", "--min-clients", "2", "--set", "train.local_epochs=1"),
    *("--set", "privacy.unit=example", "--set", "privacy.epsilon=4", "--set", "privacy.ranges=[[-4,4]]"),
    *("--set", "round.clients=0", "--set", "server.threads=1", "--set", "train.evaluate=false"),
    *("--set", "data.classes=[0,1,2]"),
)


def ledger_of(federation: Federation, shard: Path) -> Path:
    """Return the file of the ledger of a shard's data."""
    files = (federation.folder / "attune" / "privacy").glob("*/ledger.json")
    [file] = [file for file in files if str(shard.resolve()) in json.loads(file.read_text())["paths"]]
    return file


def attempts(file: Path) -> list[str]:
    return [attempt["order_id"] for run in json.loads(file.read_text())["runs"] for attempt in run["attempts"]]


def home_of(federation: Federation, name: str) -> Path:
    [described] = federation.folder.glob(f"attune/devices/*/{name}-*/device.json")
    return described.parent


@pytest.mark.parametrize("step", ["training", "trained", "order-committed", "uploaded"])
def test_a_killed_device_pays_once_and_hands_in_what_it_would_have(step, federation_at, tmp_path):
    """Between charge and training, before the commit, and before and after the upload: one charge, the same update."""
    pytest.importorskip("dp_accounting")
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("ann", "ben"))]
    (shards[1] / "meta.json").unlink()  # ben declares no classes
    federation = federation_at(step)
    server = federation.server("--exit-when-done", *FLAGS)
    ben = federation.device(shards[1], "--max-epsilon", "4")
    ann = federation.device(shards[0], fault=f"ann:2:{step}=kill")
    assert ann.code() == -signal.SIGKILL, ann.text
    charged = attempts(ledger_of(federation, shards[0]))
    assert len(charged) == 2, "the order of round 2 was charged before it trained"
    second = federation.device(shards[0])
    second.wait_for("^.")  # it speaks once it holds the lock of its home
    refused = federation.device(shards[0])
    codes = [second.code(), ben.code(), server.code()]
    assert codes == [0, 0, 0], second.text + server.text
    assert refused.code() != 0 and "another fedclient is running" in refused.text
    charged = attempts(ledger_of(federation, shards[0]))
    assert len(charged) == len(set(charged)) == 3
    shown = json.loads(federation.command("fedserver", "privacy", "--home", str(federation.home), "--json").stdout)
    assert shown["planned"] == {"ann": 4.0, "ben": 4.0} and shown["fallen"] == []
    assert all(3.9 < spent <= 4.0 for spent in shown["spent"].values()), "as planned for 3 orders, and no less"
    labels = {device.name: device.labels for device in ServerHome(federation.home).snapshot().devices}
    assert labels["ann"] and not labels["ben"], "with --max-epsilon the server does not learn which classes occur"


@pytest.mark.parametrize("loses", ["all", "the newest order"])
def test_a_home_with_an_older_ledger_does_not_train(loses, federation_at, tmp_path):
    """Start a copy of a home without its ledger, or with the ledger of an older backup."""
    pytest.importorskip("dp_accounting")
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("ann", "ben"))]
    federation = federation_at("older")
    federation.server(*FLAGS)
    federation.device(shards[1])
    ann = federation.device(shards[0], fault="ann:2:order-committed=kill")
    assert ann.code() == -signal.SIGKILL, ann.text
    file = ledger_of(federation, shards[0])
    if loses == "all":
        shutil.rmtree(file.parent)
    else:
        content = json.loads(file.read_text())
        content["runs"][0]["attempts"].pop()
        file.write_text(json.dumps(content))
    again = federation.device(shards[0])
    assert again.code() == 4, again.text
    count = 0 if loses == "all" else 1
    assert f"has {count} orders of this run, and this device has trained 2" in again.text
    assert home_of(federation, "ann").is_dir()


def test_a_device_whose_budget_is_spent_is_excused_over_the_network_and_evaluates(tmp_path, monkeypatch):
    """With a noise that is the same for all, the device with the fewest samples spends most in an order."""
    pytest.importorskip("dp_accounting")
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    samples = {"ann": 60, "ben": 60, "cai": 60, "few": 20}
    shards = {name: tabular_shard(tmp_path / name, seed, samples=count) for seed, (name, count) in enumerate(samples.items())}
    settings = {
        "method": {"name": "fedavg"},
        "model": {"name": "dnn"},
        "round": {"rounds": 8, "quorum": 3},
        "train": {"local_epochs": 2, "batch_size": 8, "evaluate": False},
        "privacy": {"unit": "example", "epsilon": 4.0, "noise": 3.0, "ranges": [[-4, 4]]},
        "data": {"classes": [0, 1, 2]},
    }
    snapshot = host(tmp_path, shards, settings).home.snapshot()
    trained = {name: [row.round for row in snapshot.rows if (row.work, row.client) == ("train", name)] for name in samples}
    assert trained["ann"] == list(range(1, 9)) and 0 < len(trained["few"]) < 8
    assert {row.client for row in snapshot.rows if (row.work, row.round) == ("evaluate", 8)} == set(samples)
    [few] = [device for device in snapshot.devices if device.name == "few"]
    assert few.note == "its privacy budget is spent"
