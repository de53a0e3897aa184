"""A device that rests between orders: memory, the same bits, and kills of either of its processes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.usage import status_bytes, tree
from tests.e2e.harness import Federation, FederationAt, Process, digit_shards, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the processes of a device are read from /proc")
MOST_BYTES = 90_000_000  # of a device that waits
FLAGS = ("--rounds", "3", "--min-clients", "2")
PLAIN = ("--device", "cpu", "--baseline", "none")


def resting(federation: Federation, shard: Path, fault: str = "") -> Process:
    """Start a device with interpreters of its own, as users do, which rests soon."""
    script = str(Path(sys.executable).with_name("fedclient"))
    command = [script, "--data", str(shard), "--server", f"localhost:{federation.port}", "--name", shard.name]
    words = [*command, *PLAIN, "--rest", "0.3", "--connect-timeout", "30"]
    process = Process(words, federation._log(shard.name), federation._with(fault), fresh=True)
    federation.processes.append(process)
    return process


def trainer(device: Process) -> int:
    """Return the id of the process that trains, once there is one."""
    return int(until(lambda: tree(device.popen.pid)[1:], f"{device.log} to train")[0])


def await_rest(device: Process) -> None:
    until(lambda: len(tree(device.popen.pid)) == 1 and "round" in device.text, f"{device.log} to rest")


def model_of(federation: Federation, shard: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in federation.model(shard).glob("*.safetensors")}


def test_a_device_rests_is_killed_and_has_the_same_model(tmp_path: Path, federation_at: FederationAt) -> None:
    first, second = digit_shards(tmp_path / "shards", 2, samples=40, test_samples=20)
    plain = federation_at("plain")
    plain.server(*FLAGS)
    assert not any(device.code() for device in [plain.device(shard, *PLAIN[2:]) for shard in (first, second)])

    federation = federation_at("resting")
    server = federation.server(*FLAGS)
    slow = f"{second.name}:2:training=sleep:8,{second.name}:*:compared=sleep:8"
    other = federation.device(second, *PLAIN[2:], fault=slow)
    device = resting(federation, first, f"{first.name}:1:training=sleep:3")
    device.await_fault()
    os.kill(trainer(device), signal.SIGKILL)  # in the middle of an order
    device.wait_for(r"has ended \(signal 9\)")
    other.wait_for("^fault: .*:2:training")
    await_rest(device)
    maps = Path(f"/proc/{device.popen.pid}/maps").read_text()
    assert "torch" not in maps and status_bytes(device.popen.pid, "VmRSS") < MOST_BYTES
    busy = resting(federation, first)  # the lock is held, and the error of the process that trains reaches its user
    assert busy.code() == 5 and "another fedclient is running" in busy.text
    device.kill()  # while it waits

    device = resting(federation, first, f"{first.name}:3:training=sleep:30")
    device.await_fault()
    trains = trainer(device)
    device.kill()  # while the other process trains, which ends too
    until(lambda: not Path(f"/proc/{trains}").exists() or "Z" in Path(f"/proc/{trains}/stat").read_text(), "it to end")

    device = resting(federation, first)
    other.wait_for("^fault: .*:compared")
    await_rest(device)
    assert other.code() == 0
    server.kill()  # the farewell came to the process that waits, and the one that trains does not reach the server any more
    assert device.code() == 0, device.text
    assert "Traceback" not in device.text, device.text
    assert model_of(federation, first) == model_of(plain, first)
    assert "other process" not in server.text and "turned away" not in server.text
