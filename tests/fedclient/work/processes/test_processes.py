"""Real processes: killed during training and started again, and stopped by signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from attune.common import faults
from attune.common.wire.files import read_tensors
from tests.e2e.harness import Process
from tests.forked import STEADY

SLOW = "kiel:*:training=sleep:0.5"


@pytest.fixture
def device(bench):
    """Start a device as a process; `slow` makes every batch take half a second."""
    started = []

    def start(*more, slow=False):
        command = [str(Path(sys.executable).with_name("fedclient")), "--data", str(bench.shard)]
        command += [
            "--server",
            f"127.0.0.1:{bench.server.port}",
            "--home",
            str(bench.folder / "home"),
            "--device",
            "cpu",
            *more,
        ]
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
