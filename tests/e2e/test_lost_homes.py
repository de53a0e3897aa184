"""After the end a device that lost its state gets what the server has, and a run that was put aside is taken up again."""

import shutil
from collections import Counter
from pathlib import Path

from attune.fedserver.home import ServerHome
from attune.fedserver.stores.audit import entries
from tests.e2e.harness import FederationAt, tabular_shard

FIRST = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "1", "--set", "train.local_epochs=1")
SECOND = ("--method", "fedper", "--model", "mlr", "--min-clients", "2", "--rounds", "1")


def test_a_device_comes_back_after_the_end_of_its_run(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("lost")
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("loses", "goes-back"))]
    server = federation.server(*FIRST)
    for device in federation.devices(shards):
        assert device.code() == 0, device.text
    model = federation.model(shards[0])
    weights = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}

    for lost in ("orders", "model"):
        shutil.rmtree(model.parent / lost)
    device = federation.device(shards[0])
    assert device.code() == 0, device.text
    assert "asking the server for the model" in device.text
    assert {path.name: path.read_bytes() for path in model.glob("*.safetensors")} == weights

    assert server.stop() == 0
    backup = federation.home.parent / "backup"
    federation.command("fedserver", "backup", "--out", str(backup))
    federation.command("fedserver", "run", "new", "second", *SECOND)
    server = federation.server()
    for device in federation.devices(shards):
        assert device.code() == 0, device.text
    assert server.stop() == 0
    shutil.rmtree(federation.home)
    federation.command("fedserver", "restore", "--from", str(backup), "--home", str(federation.home))
    federation.server()
    back = federation.device(shards[1])
    assert back.code() == 0, back.text
    assert "goes on here from what was kept in" in back.text
    assert not (federation.model(shards[1]).parent / "runs" / "first").exists()


# --- a federation whose certificates live for a minute: they are renewed beside training, and no round loses a device

DEVICES = 2
FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", str(DEVICES), "--rounds", "1000")
SHORT = ("--set", "server.certificate_days=0.0007", "--set", f"round.quorum={DEVICES}")


def test_devices_renew_beside_their_work_and_no_round_is_without_one(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("short")
    shards = [tabular_shard(tmp_path / f"s{number}", number) for number in range(DEVICES)]
    federation.server(*FLAGS, *SHORT)
    devices = [federation.device(shard, fault="*:*:training=sleep:0.8") for shard in shards]

    for device in devices:
        device.wait_for("renewed this device's certificate")
    renewed = {entry.facts["name"] for entry, _ in entries(federation.home / "audit.jsonl") if entry.event == "renewed"}
    assert renewed == {shard.name for shard in shards}
    closed = federation.status()["round"]
    federation.await_status(lambda status: status["round"] >= closed + 2)
    updates = Counter(row.round for row in ServerHome(federation.home).snapshot().rows if row.work == "train")
    assert sorted(updates) == list(range(1, len(updates) + 1)) and set(updates.values()) == {DEVICES}
    assert [device.popen.poll() for device in devices] == [None] * DEVICES
    assert federation.status()["refused"] == []
