"""After the end a device that lost its state gets what the server has, and a run that was put aside is taken up again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Federation, tabular_shard

FIRST = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "1", "--set", "train.local_epochs=1")
SECOND = ("--method", "fedper", "--model", "mlr", "--min-clients", "2", "--rounds", "1")


def test_a_device_comes_back_after_the_end_of_its_run(federation_at: Callable[[str], Federation], tmp_path: Path) -> None:
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
