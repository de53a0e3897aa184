"""Embeddings on real devices, under secure aggregation: both sides are killed, and a device comes late."""

import shutil
import signal
from pathlib import Path

import torch

from attune.common.wire.files import read_tensors
from tests.e2e.harness import Federation, FederationAt, Process, digit_shards

SETTINGS = (
    *("method.name=pfedhn", "method.embedding=device", "method.hidden=8", "model.name=mlr", "train.local_epochs=1"),
    *("server.threads=1", "round.rounds=2", "round.grace_s=2.0"),
    *("privacy.secure_aggregation=true", "privacy.secure_devices=3"),
)
FLAGS = ["--min-clients", "3", *(word for setting in SETTINGS for word in ("--set", setting))]


def home(federation: Federation, shard: Path) -> Path:
    [folder] = federation.folder.glob(f"attune/devices/localhost_{federation.port}/{shard.name}-*")
    return folder


def embedding(federation: Federation, shard: Path) -> dict[str, torch.Tensor]:
    [path] = home(federation, shard).glob("orders/evaluate-2-*/embedding.safetensors")
    return read_tensors(path)


def killed(process: Process) -> None:
    assert process.code() == -signal.SIGKILL, process.text


def test_kills_on_both_sides_leave_the_same_bits_and_a_newcomer_is_served(federation_at: FederationAt, tmp_path: Path) -> None:
    *shards, late = digit_shards(tmp_path / "shards", 4, 60, 20)
    whole = federation_at("whole")
    server = whole.server(*FLAGS, "--exit-when-done")
    processes = whole.devices(shards)
    assert [process.code() for process in (*processes, server)] == [0, 0, 0, 0], server.text

    broken = federation_at("broken")
    server = broken.server(*FLAGS, fault="server:1:secure-survivors=kill")
    for process in [broken.device(shard, fault="*:1:training=kill") for shard in shards]:
        killed(process)
    for shard in shards:  # the draw is random: give both federations the same one
        shutil.copy(home(whole, shard) / "orders" / "secret", home(broken, shard) / "orders" / "secret")
    processes = [
        broken.device(shards[0], fault="*:1:order-committed=kill"),
        broken.device(shards[1], fault="*:2:training=kill"),
        broken.device(shards[2], fault="*:2:state-written=kill"),
    ]
    killed(processes[0])
    processes[0] = broken.device(shards[0])
    killed(server)
    server = broken.server(fault="server:2:committed=kill")
    for k in (1, 2):
        killed(processes[k])
        processes[k] = broken.device(shards[k])
    killed(server)
    server = broken.server()
    assert [process.code() for process in processes] == [0, 0, 0], server.text
    name = "generated.value.2.safetensors"
    assert (broken.home / "state" / name).read_bytes() == (whole.home / "state" / name).read_bytes()
    for shard in shards:
        one, other = embedding(whole, shard), embedding(broken, shard)
        assert one["numbers"].tolist() == [2, 0, 0], "both updates counted, and no step waits"
        assert all(torch.equal(one[key], other[key]) for key in one)

    newcomer = broken.device(late)
    assert newcomer.code() == 0, newcomer.text
    assert embedding(broken, late)["numbers"].tolist() == [0, 0, 0]
    exported = broken.export()
    assert "hypernetwork.safetensors" in exported
    assert not any(path.startswith("clients/") for path in exported)
