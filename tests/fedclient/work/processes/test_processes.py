"""Real processes: killed, stopped and started again; a hosted fleet has the same bits as a process for each device."""

import csv
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from attune.common import faults
from attune.common.wire.files import read_tensors
from tests.e2e.harness import Process, digit_shards
from tests.forked import STEADY

SLOW = "kiel:*:training=sleep:0.5"


@pytest.fixture
def device(bench):
    """Start a device as a process; `slow` makes every batch take half a second."""
    started = []

    def start(*more, slow=False):
        command = [str(Path(sys.executable).with_name("fedclient")), "--data", str(bench.shard)]
        command += [
            "--server", f"127.0.0.1:{bench.server.port}", "--home", str(bench.folder / "home"), "--device", "cpu", *more,
        ]  # fmt: skip
        environment = os.environ | STEADY | {faults.VARIABLE: SLOW if slow else ""}
        started.append(Process(command, bench.folder / f"device{len(started)}.log", environment))
        return started[-1]

    yield start
    for process in started:
        process.popen.kill()


def await_training(process):
    process.wait_for("^fault: kiel:1:training")


def test_kill_in_mid_training_then_the_same_identity_and_the_same_bits(bench, device, make_bench):
    undisturbed = make_bench()
    expected = read_tensors(undisturbed.run(home=bench.folder / "undisturbed") / "model.safetensors")

    process = device("--name", "kiel", "--token", bench.server.token(), slow=True)
    await_training(process)
    process.kill()
    assert not list((bench.folder / "home" / "orders").glob("train-1-kiel"))

    again = device()
    assert again.code() == 0, again.text
    assert bench.server.seen.enrolled == ["kiel"]
    kept = read_tensors(bench.folder / "home" / "model" / "model.safetensors")
    assert all(kept[name].equal(expected[name]) for name in expected)
    lines = again.text.splitlines()
    assert lines[-1].endswith(str(bench.folder / "home" / "model"))
    assert any(line.startswith("round 2  loss ") and " -> " in line for line in lines)


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_at_once(bench, device, which, code):
    process = device("--name", "kiel", "--token", bench.server.token(), slow=True)
    await_training(process)
    process.signal(which)
    assert process.code() == code
    assert "Traceback" not in process.text
    assert "start again to continue" in process.text


FLAGS = ("--exit-when-done", "--min-clients", "3", "--rounds", "2", "--set", "train.local_epochs=1")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return digit_shards(tmp_path_factory.mktemp("shards"), 3, 40, 20)


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
