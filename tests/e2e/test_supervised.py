"""Server and device under a supervisor that listens as systemd does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Federation, tabular_shard, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "1", "--rounds", "1")


def test_server_and_device_tell_their_supervisor_how_they_are(
    federation_at: Callable[[str], Federation], tmp_path: Path
) -> None:
    federation = federation_at("supervised")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        place = Path(f"/tmp/attune-{tmp_path.stat().st_ino}")  # noqa: S108 (a socket's path is short)
        listener.bind(str(place))
        listener.setblocking(False)
        heard: list[str] = []

        def told(start: str, part: str = "") -> bool:
            try:
                while True:
                    heard.append(listener.recv(4096).decode())
            except BlockingIOError:
                return any(message.startswith(start) and part in message for message in heard)

        federation.environment |= {"NOTIFY_SOCKET": str(place), "WATCHDOG_USEC": "900000"}
        try:
            server = federation.server(*FLAGS)
            until(lambda: told("READY=1", "waiting"), "the server to be ready")
            until(lambda: told("WATCHDOG=1", "waiting"), "the server's heartbeat")
            heard.clear()
            device = federation.device(tabular_shard(tmp_path / "s", 0))
            until(lambda: told("READY=1"), "the device to be ready")
            assert device.code() == 0
            until(lambda: told("STOPPING=1"), "the device to say that it stops")
            until(lambda: told("WATCHDOG=1", "done"), "the server's heartbeat at the end")
            heard.clear()
            assert server.stop() == 0
            assert told("STOPPING=1")
        finally:
            place.unlink()
