"""A standby says that it is one: to its operator, its supervisor, monitors and the image's check. It ends as it is told to."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attune.features.web.page_tokens import METRICS_FILE
from tests import engines
from tests.chaos.site import Child, Shape, Site
from tests.features.web.conftest import Page
from tests.forked import ENTRIES

pytestmark = pytest.mark.engines
SHAPE = Shape("fedavg", 2, ("method.name=fedavg", "model.name=mlr", "round.rounds=3"), hosted=True)
WAITS = "another server serves this federation; this one takes over when it ends"


class Supervisor:
    """A socket that hears what a process tells, as systemd does."""

    def __init__(self, place: Path) -> None:
        self.place, self.heard = place, list[str]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(place))
        self._socket.setblocking(False)

    def told(self, word: str) -> list[str]:
        try:
            while True:
                self.heard.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return [message for message in self.heard if word in message]

    def close(self) -> None:
        self._socket.close()
        self.place.unlink()


def start_standby(site: Site, home: Path, *words: str) -> Child:
    shutil.copytree(site.server_home / "ca", home / "ca")
    site.server_words = [*site.server_words, *words]
    standby = site._fork("standby", ENTRIES["fedserver"], site.words_of(home, engines.free_port()), "")
    site.until(lambda: WAITS in standby.text or standby.exit is not None, "the standby to wait")
    assert standby.exit is None, standby
    return standby


def ready(page: Page) -> bool:
    try:
        return bool(page.ask("/readyz").status == 200)
    except ConnectionRefusedError:  # between the page of the standby and that of the server
        return False


def metrics(text: str) -> dict[str, float]:
    found = re.findall(r"^(attune_[^ ]+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_a_standby_says_everywhere_that_it_is_one_and_then_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: dict[str, Path], instructions: Callable[..., Any]
) -> None:
    health = ["sh", "-c", dict(instructions("Dockerfile.server"))["HEALTHCHECK"].partition("CMD ")[2]]
    supervisor = Supervisor(Path(f"/tmp/attune-{os.getpid()}-{tmp_path.stat().st_ino}"))  # noqa: S108 (a socket's path is short)
    with Site(tmp_path / "site", SHAPE, 120.0) as site:
        site.server_words = engines.remote_words()
        site.start_server()
        home = tmp_path / "server"
        monkeypatch.setenv("NOTIFY_SOCKET", str(supervisor.place))
        monkeypatch.setenv("WATCHDOG_USEC", "900000")
        page = Page(engines.free_port())
        standby = start_standby(site, home, "--dashboard", str(page.port))
        site.until(lambda: supervisor.told("READY=1"), "the standby to be ready")
        assert f"STATUS=standby: {WAITS}" in supervisor.told("READY=1")[0]
        site.until(lambda: supervisor.told("WATCHDOG=1"), "its heartbeat")
        assert (page.ask("/healthz").status, page.ask("/readyz").status) == (200, 503)
        assert page.ask("/readyz").text == f"standby: {WAITS}\n"
        said = page.ask("/metrics", token=(home / METRICS_FILE).read_text())
        assert (said.status, metrics(said.text)) == (200, {"attune_standby": 1.0}), "no series that an alert asks for"
        path = f"{commands['fedserver'].parent}:{os.environ['PATH']}"
        environment = os.environ | {"ATTUNE_HOME": str(tmp_path), "PATH": path}

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)

        assert run(*health).returncode == 0
        status = json.loads(run("fedserver", "status", "--json").stdout)
        assert (status["running"], status["address"], status["standby"], status["troubles"]) == (True, None, WAITS, [])
        assert f"server a standby: {WAITS}" in run("fedserver", "status").stdout
        paused = run("fedserver", "pause")
        assert paused.returncode == 13 and "is a standby: run this on the machine of the server that serves" in paused.stderr
        supervisor.heard.clear()
        site.stop_server()
        site.until(lambda: "listens on" in standby.text, "the standby to serve")
        site.until(lambda: ready(page), "its page to be that of a server")
        said = page.ask("/metrics", token=(home / METRICS_FILE).read_text())
        values = metrics(said.text)
        assert (values["attune_standby"], values["attune_running"], values["attune_needs_backup"]) == (0, 1, 0)
        status = json.loads(run("fedserver", "status", "--json").stdout)
        assert status["standby"] is None and status["address"]
        assert not supervisor.told("STOPPING=1")
        standby.signal(signal.SIGTERM)
        site.until(lambda: standby.exit is not None, "the server to end")
        assert standby.exit == 0 and supervisor.told("STOPPING=1")
        assert not site.tracebacks(), standby
    supervisor.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_standby_that_is_told_to_stop_ends_with_0(tmp_path: Path, number: int) -> None:
    with Site(tmp_path / "site", SHAPE, 60.0) as site:
        site.server_words = engines.remote_words()
        site.start_server()
        standby = start_standby(site, tmp_path / "standby", "--dashboard", "off")
        standby.signal(number)
        site.until(lambda: standby.exit is not None, "the standby to end")
        assert standby.exit == 0 and "this server has only waited" in standby.text, standby
        assert site.server.exit is None
        site.stop_server()
        assert not site.tracebacks(), standby
