"""A server that has no free file descriptors says so, and continues by itself when it has some again."""

import resource
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import FederationAt, tabular_shard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process can be set on Linux only")


def test_rounds_go_on_when_files_can_be_opened_again(federation_at: FederationAt, tmp_path: Path) -> None:
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
