"""Real processes: killed in mid-training and started again, and stopped by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from attune.common.wire.files import read_tensors

SLOW = """
import os, sys, time
import attune.fedclient.work.trainer as trainer
real = trainer.Trainer.train
def slow(self, *args, **kwargs):
    open(os.environ["TRAINING"], "w").close()
    def stall(done, tell=args[5]):
        time.sleep(0.5)
        tell(done)
    return real(self, *args[:5], stall, *args[6:], **kwargs)
trainer.Trainer.train = slow
from attune.fedclient.cli import main
main()
"""


@pytest.fixture
def device(bench):
    """Starts a device as a process; `slow` makes every batch take half a second."""
    started = []

    def start(*more, slow=False):
        command = [sys.executable, *(["-c", SLOW] if slow else ["-m", "attune.fedclient.cli"])]
        command += ["--data", str(bench.shard), "--server", f"127.0.0.1:{bench.server.port}"]
        command += ["--home", str(bench.folder / "home"), "--device", "cpu", *more]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRAINING": str(bench.folder / "training")},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path, process):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_kill_in_mid_training_then_the_same_identity_and_the_same_bits(bench, device, make_bench):
    undisturbed = make_bench()
    expected = read_tensors(undisturbed.run(home=bench.folder / "undisturbed") / "model.safetensors")

    process = device("--name", "kiel", "--token", bench.server.token(), slow=True)
    wait_for(bench.folder / "training", process)
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
    wait_for(bench.folder / "training", process)
    process.send_signal(which)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert "Traceback" not in err
    assert "start again to go on" in err
