"""One side is stopped (SIGSTOP) behind an idle open connection: the other side notices."""

from __future__ import annotations

import re
import signal

from tests.e2e.harness import tabular_shard, until

NOTICED_S = 5.0
ROOM_S = 3.0  # allowance for a busy machine


def count(process, pattern):
    return len(re.findall(pattern, process.text, re.MULTILINE))


def test_a_frozen_side_is_noticed_and_taken_up_again(federation_at, tmp_path):
    federation = federation_at("frozen")
    server = federation.server("--min-clients", "2")
    device = federation.device(tabular_shard(tmp_path / "one", 1))
    device.wait_for("waiting for 1 more device")

    device.signal(signal.SIGSTOP)
    until(lambda: count(server, " one disconnected"), "the server notices a frozen device", NOTICED_S + ROOM_S)
    device.signal(signal.SIGCONT)
    until(lambda: count(server, " one connected") == 2, "the device comes back")
    device.wait_for("^connected again")

    server.signal(signal.SIGSTOP)
    until(lambda: count(device, "the server has stopped answering"), "the device notices a frozen server", NOTICED_S + ROOM_S)
    server.signal(signal.SIGCONT)
    until(lambda: count(server, " one connected") == 3, "the device comes back")
    until(lambda: count(device, "^connected again") == 2, "the device says so")
    assert device.stop() in (0, 130, 143, -signal.SIGTERM)
    assert server.stop() == 0
    for process in (server, device):
        assert not re.search("Traceback|Task was destroyed|never retrieved|aclose", process.text), process.text
