"""A federation over the network whose state is in PostgreSQL and S3 has the bits of one in a folder, whatever is killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import engines
from tests.chaos.site import Outcome, Shape, Site

PATIENCE_S = 180.0
SHAPE = Shape(
    "fedmcsa", 2,
    ("method.name=fedmcsa", "model.name=mlr", "round.rounds=4", "train.local_steps=3", "server.inline_bytes=0"), hosted=True,
)  # fmt: skip


def run(site: Site, disturb: Callable[[Site], None] = lambda site: None) -> Outcome:
    site.start_server()
    site.start_device("fleet")
    disturb(site)
    fleet = site.children["fleet"]
    site.until(lambda: fleet.exit is not None, "the devices to end")
    assert fleet.exit == 0, f"{fleet}\n{site.server}"
    site.stop_server()
    assert not site.tracebacks(), site.server
    return site.outcome()


@pytest.fixture(scope="module")
def in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with Site(tmp_path_factory.mktemp("folder") / "site", SHAPE, PATIENCE_S) as site:
        return run(site)


def remote_site(folder: Path) -> Site:
    words = engines.remote_words()
    site = Site(folder / "site", SHAPE, PATIENCE_S)
    site.server_words = words
    return site


def closed(site: Site, rounds: int) -> Callable[[], bool]:
    return lambda: site.snapshot().record.round >= rounds


def kill_the_server(site: Site) -> None:
    for rounds in (1, 3):
        site.until(closed(site, rounds), "rounds to close")
        site.server.signal(signal.SIGKILL)
        site.until(lambda: site.server.exit is not None, "the server to be gone")
        site.start_server()


def kill_postgres(site: Site) -> None:
    for rounds in (1, 2):
        site.until(closed(site, rounds), "rounds to close")
        engines.postgres().kill()
        time.sleep(1.0)
        engines.postgres().start()


def stop_the_store(site: Site) -> None:
    site.until(closed(site, 1), "a round to close")
    process = engines.weed().process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("disturb", [lambda site: None, kill_the_server, kill_postgres, stop_the_store])
def test_the_bits_are_those_of_a_folder(tmp_path: Path, in_a_folder: Outcome, disturb: Callable[[Site], None]) -> None:
    with remote_site(tmp_path) as site:
        assert run(site, disturb).differences(in_a_folder) == []
        assert not list(site.server_home.glob("state.sqlite*"))
