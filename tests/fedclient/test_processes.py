"""Real processes: killed in mid-training and started again, and stopped by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from attune.common import faults
from attune.common.wire.files import read_tensors

SLOW = "kiel:*:training=sleep:0.5"


@pytest.fixture
def device(bench):
    """Starts a device as a process; `slow` makes every batch take half a second."""
    started = []

    def start(*more, slow=False):
        command = [
            sys.executable,
            "-m",
            "attune.fedclient.cli",
            "--data",
            str(bench.shard),
            "--server",
            f"127.0.0.1:{bench.server.port}",
        ]
        command += ["--home", str(bench.folder / "home"), "--device", "cpu", *more]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {faults.VARIABLE: SLOW if slow else ""},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_training(process):
    for line in process.stderr:
        if line.startswith("fault: kiel:1:training"):
            return
    raise AssertionError(f"ended ({process.wait()}) before its first batch")


def test_kill_in_mid_training_then_the_same_identity_and_the_same_bits(bench, device, make_bench):
    undisturbed = make_bench()
    expected = read_tensors(undisturbed.run(home=bench.folder / "undisturbed") / "model.safetensors")

    process = device("--name", "kiel", "--token", bench.server.token(), slow=True)
    await_training(process)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not list((bench.folder / "home" / "orders").glob("train-1-kiel"))

    again = device()
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err) == (0, "")
    assert bench.server.seen.enrolled == ["kiel"]
    kept = read_tensors(bench.folder / "home" / "model" / "model.safetensors")
    assert all(kept[name].equal(expected[name]) for name in expected)
    lines = out.splitlines()
    assert lines[-1].endswith(str(bench.folder / "home" / "model"))
    assert any(line.startswith("round 2  loss ") and " -> " in line for line in lines)


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_at_once(bench, device, which, code):
    process = device("--name", "kiel", "--token", bench.server.token(), slow=True)
    await_training(process)
    process.send_signal(which)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert "Traceback" not in err
    assert "start again to continue" in err
