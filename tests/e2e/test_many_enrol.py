"""A fleet enrols at once: its devices share one token, and each of them is accepted."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attune.common import aio
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import DeviceHome, DeviceInfo
from attune.fedclient.link.enrol import enrol
from tests.e2e.harness import Federation, tabular_shard

DEVICES = 100  # more than one caller may have calls and connections


def test_devices_that_share_a_token_enrol_at_once(federation_at: Callable[[str], Federation], tmp_path: Path) -> None:
    federation = federation_at("many")
    server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9", "--join-uses", str(DEVICES))
    address, token = ServerAddress("127.0.0.1", server.port), server.join_token

    async def all_of_them() -> list[str]:
        homes = [(DeviceHome(tmp_path / f"d{number}"), f"d{number:03}") for number in range(DEVICES)]
        records = [(home, DeviceInfo(name, str(address), str(tmp_path))) for home, name in homes]
        found = await asyncio.gather(*(enrol(home, info, address, token, 60.0, print) for home, info in records))
        return [identity.name for identity in found]

    assert aio.run(all_of_them()) == [f"d{number:03}" for number in range(DEVICES)]
    status = federation.status()
    assert len(status["clients"]) == DEVICES
    assert status["refused"] == []


# --- a server that has no free file descriptors says so, and continues by itself when it has some again

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process can be set on Linux only")


def test_rounds_go_on_when_files_can_be_opened_again(federation_at: Callable[[str], Federation], tmp_path: Path) -> None:
    federation = federation_at("descriptors")
    shards = [tabular_shard(tmp_path / f"s{number}", number) for number in range(2)]
    server = federation.server(
        "--exit-when-done", "--method", "fedavg", "--model", "mlr", "--rounds", "4", "--min-clients", "2"
    )
    devices = [federation.device(shard, fault="*:*:training=sleep:0.1") for shard in shards]
    federation.await_status(lambda status: status["round"] >= 1)
    pid = server.popen.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used // 2, limits[1]))
    server.wait_for("Too many open files")
    server.wait_for("trying again")  # the first sign may be an answer to a device, which tries again by itself
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert [device.code() for device in devices] == [0, 0], [device.text for device in devices]
    assert server.code() == 0
    assert "goes on" in server.text
    assert "Traceback" not in server.text
