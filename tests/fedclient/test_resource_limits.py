"""Resource limits that a device's owner sets: each limit holds, and a wait is reported once."""

import subprocess
import sys

import pytest

from attune.common import aio
from attune.common.errors import LimitExceeded
from attune.fedclient import resource_limits
from attune.fedclient.resource_limits import Allowance, ResourceLimits, on_battery, unmet, until_met


def supply(folder, name, **words):
    (folder / name).mkdir(parents=True)
    for key, value in words.items():
        (folder / name / key).write_text(f"{value}\n")


def test_mains_decide_where_there_are_some_else_the_battery(tmp_path):
    assert not on_battery(tmp_path), "a machine without either"
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert on_battery(tmp_path)
    (tmp_path / "BAT0" / "status").write_text("Full\n")
    assert not on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="0")
    assert on_battery(tmp_path)
    (tmp_path / "AC" / "online").write_text("1\n")
    assert not on_battery(tmp_path)


def test_a_condition_that_is_not_met_says_why(tmp_path):
    supply(tmp_path, "AC", type="Mains", online="0")
    assert unmet(("charging",), power=tmp_path) == "it runs on its battery"
    assert unmet(("idle",), load=lambda: 1000.0).startswith("the machine is busy (1000.0 of")
    assert unmet(("idle", "charging"), load=lambda: 0.0, power=tmp_path / "none") == ""
    assert unmet((), load=lambda: 1000.0) == ""


def test_a_device_waits_until_it_may_and_says_so_once(monkeypatch):
    monkeypatch.setattr(resource_limits, "LOOK_S", 0.0)
    said, reasons = [], ["it runs on its battery", "it runs on its battery", ""]
    aio.run(until_met(("charging",), said.append, lambda when: reasons.pop(0)))
    assert (said, reasons) == (["waiting: it runs on its battery"], [])


def test_bytes_are_paid_for_at_the_rate_and_a_rest_saves_nothing():
    """Expect 0.5 s for 50 bytes at 100 bytes/s, and 1 s for 50 more; after 10 s of rest 50 bytes cost 0.5 s again."""
    now = 0.0
    allowance = Allowance(100.0, lambda: now)
    assert allowance.owed_s(50) == pytest.approx(0.5)
    assert allowance.owed_s(50) == pytest.approx(1.0)
    now = 11.0
    assert allowance.owed_s(50) == pytest.approx(0.5)
    assert Allowance(0.0).owed_s(1 << 40) == 0.0


def test_a_home_does_not_grow_beyond_its_bound(tmp_path):
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "state").write_bytes(b"x" * 600)
    ResourceLimits(disk_bytes=1000).check_disk(tmp_path, 400)
    with pytest.raises(LimitExceeded, match=r"would have 1,001 bytes .* allows 1,000 \(--max-disk\)"):
        ResourceLimits(disk_bytes=1000).check_disk(tmp_path, 401)
    ResourceLimits().check_disk(tmp_path, 1 << 50)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts allocations on Linux")
def test_priority_and_memory_are_bounded_for_the_process():
    code = (
        "import os; from attune.fedclient.resource_limits import ResourceLimits; before = os.nice(0)\n"
        "ResourceLimits(nice=5, memory_bytes=1 << 28).apply(); print(os.nice(0) - before)\n"
        "try:\n    bytearray(1 << 29)\nexcept MemoryError:\n    print('bounded')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["bounded"]
    assert int(done.stdout.split()[0]) in range(6)  # 19 is the lowest priority
