"""Buffered rounds with real processes: a slow device holds nobody up, one joins later, and a simulation repeats all bits."""

from pathlib import Path

import attune
from attune.common.config import load_settings
from attune.fedserver.core.records import arrivals_of
from attune.fedserver.home import ServerHome
from attune.simulation.simulated_clock import SimulatedClock
from tests.e2e.harness import Federation, Process

SETTINGS = (
    "method.name=fedmcsa", "model.name=mlr", "round.mode=buffered", "round.buffer=2", "round.min_clients=2",
    "round.rounds=8", "round.evaluate_every=4", "train.local_steps=4", "server.threads=1",
)  # fmt: skip


def test_a_run_over_the_network_can_be_repeated(tmp_path: Path, three_shards: list[Path]) -> None:
    federation = Federation(tmp_path / "network")
    server = federation.server(*(word for setting in SETTINGS for word in ("--set", setting)))
    delays = dict(zip((shard.name for shard in three_shards), (0.5, 0.1, 0.1), strict=True))  # seconds of a batch

    def start(shard: Path) -> Process:
        return federation.device(shard, "--disclose", "statistics", fault=f"*:*:training=sleep:{delays[shard.name]}")

    *first, late = three_shards
    devices = [start(shard) for shard in first]
    server.wait_for(r"round 1/8 closed")
    devices.append(start(late))
    assert [device.code() for device in devices] == [0, 0, 0]
    ledger = ServerHome(federation.home).snapshot()
    stale = {row.client: row.staleness for row in ledger.rows if row.staleness}
    assert max(stale.values(), default=0) >= 1, "the slow device was overtaken"
    assert federation.status()["buffer"]["size"] == 2
    exported = {name: data for name, data in federation.export().items() if name.endswith(".safetensors")}
    arrivals = arrivals_of(ledger.rows, ledger.devices, ledger.record)
    assert [arrival.device for arrival in arrivals if not arrival.founder] != [], "a device has joined later, and trained"
    repeated = attune.simulate(
        {shard.name: shard for shard in three_shards},
        settings=load_settings(None, SETTINGS, {}),
        clock=SimulatedClock(arrivals=arrivals),
        progress=False,
    )
    repeated.save(tmp_path / "repeated")
    files = [path for path in (tmp_path / "repeated").rglob("*.safetensors") if "models" not in path.parts]
    assert {str(path.relative_to(tmp_path / "repeated")): path.read_bytes() for path in files} == exported
