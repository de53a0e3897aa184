"""A hosted fleet against a real server: the same bits as with a process for each device, also after kill -9 during a round."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from attune.common import faults
from tests.e2e.harness import Federation, Process, digit_shards

FLAGS = ("--exit-when-done", "--min-clients", "3", "--rounds", "2", "--set", "train.local_epochs=1")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return digit_shards(tmp_path_factory.mktemp("shards"), 3, 40, 20)


@pytest.fixture
def federation_at(tmp_path):
    made = []

    def make(name):
        made.append(Federation(tmp_path / name))
        return made[-1]

    yield make
    for federation in made:
        federation.close()


def fleet(federation, shards, log, fault=""):
    command = [str(Path(sys.executable).with_name("fedclient")), "--data", f"{shards[0].parent}/*", "--device", "cpu"]
    command += ["--server", f"localhost:{federation.port}", "--name", "edge"]
    process = Process(command, federation.folder / log, federation.environment | {faults.VARIABLE: fault})
    federation.processes.append(process)
    return process


def outcome(federation, shards):
    """Return the whole outcome, except times and the federation's own id."""
    exported = federation.export()
    kept = {name: data for name, data in exported.items() if name.endswith(".safetensors")}
    for shard in shards:
        folder = federation.model(shard)
        kept[shard.name] = (folder / "model.safetensors").read_bytes()
        kept[f"{shard.name}.json"] = re.sub(rb'"federation": *"[^"]*"', b"", (folder / "model.json").read_bytes())
    rows = csv.DictReader(exported["metrics.csv"].decode().splitlines())
    return kept, [{key: row[key] for key in row if key not in ("seconds", "bytes_down")} for row in rows]


def test_a_fleet_and_separate_processes_give_the_same_bits(federation_at, shards):
    federation = federation_at("separate")
    server = federation.server(*FLAGS)
    devices = [federation.device(shard, name=f"edge-{shard.name}") for shard in shards]
    assert [process.code() for process in (*devices, server)] == [0] * 4
    expected = outcome(federation, shards)
    assert len(expected[0]) >= 9

    federation = federation_at("hosted")
    server = federation.server(*FLAGS)
    # Devices train one after the other: the first one's update may have arrived, the third one's has not.
    stuck = fleet(federation, shards, "stuck.log", f"edge-{shards[1].name}:1:training=hang")
    stuck.await_fault()
    stuck.kill()
    again = fleet(federation, shards, "again.log")
    assert again.code() == 0, again.text
    assert server.code() == 0
    assert outcome(federation, shards) == expected
    rows = again.text.splitlines()[-3:]
    assert [row.split()[0] for row in rows] == [f"edge-{shard.name}" for shard in shards]
    assert [row.split()[-1] for row in rows] == [str(federation.model(shard)) for shard in shards]
