"""A federation whose certificates live for a minute: they are renewed beside training, and no round loses a device.

`python -m benchmarks.certificates` runs it for any time; here it runs until each device has renewed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from attune.fedserver.home import ServerHome
from attune.fedserver.stores.audit import entries
from tests.e2e.harness import Federation, tabular_shard

DEVICES = 2
FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", str(DEVICES), "--rounds", "1000")
SHORT = ("--set", "server.certificate_days=0.0007", "--set", f"round.quorum={DEVICES}")


def test_devices_renew_beside_their_work_and_no_round_is_without_one(
    federation_at: Callable[[str], Federation], tmp_path: Path
) -> None:
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
