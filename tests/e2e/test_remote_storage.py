"""A federation over the network whose state is in PostgreSQL and S3 has the bits of one in a folder, whatever is killed."""

import math
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common.errors import HomeBusy, HomeMismatch, ServerReplaced
from attune.fedserver.cli import cli
from attune.fedserver.home import ServerHome, StoragePlace
from benchmarks.rough import Proxy
from tests import engines
from tests.chaos.site import Child, Outcome, Shape, Site
from tests.forked import ENTRIES

pytestmark = pytest.mark.engines
PATIENCE_S = 180.0
SHAPE = Shape(
    "fedmcsa", 2,
    ("method.name=fedmcsa", "model.name=mlr", "round.rounds=4", "train.local_steps=3", "server.inline_bytes=0"), hosted=True,
)  # fmt: skip


def run(site: Site, disturb: Callable[[Site], None] = lambda site: None) -> Outcome:
    site.start_server()
    site.start_device("fleet")
    disturb(site)
    return rest(site)


def rest(site: Site) -> Outcome:
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


def kill_the_server(site: Site, after: Sequence[int] = (1, 3)) -> None:
    for rounds in after:
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


def test_a_closed_form_has_the_bits_of_a_folder(tmp_path: Path) -> None:
    """The server is killed between the rounds of `analytic`, when the sums of single devices are in S3."""
    shape = replace(SHAPE, settings=("method.name=analytic", "model.features=50", "server.inline_bytes=0"))
    words = ("--disclose", "statistics", "--disclose", "sums", "--standardise", "federation")

    with Site(tmp_path / "folder", shape, PATIENCE_S) as site:
        site.device_words = words
        expected = run(site)
    with Site(tmp_path / "remote", shape, PATIENCE_S) as site:
        site.device_words, site.server_words = words, engines.remote_words()
        assert run(site, partial(kill_the_server, after=(1,))).differences(expected) == []


# --- a standby

REVOKED_S = 2.0
SERVES_S = 5.0  # from the moment at which the active server is gone or silent


class Pair:
    """A server, and another one that waits. Devices know both. With a proxy, the first reaches the database through it."""

    def __init__(self, site: Site, proxy: Proxy | None = None) -> None:
        self.site, self.home, self.port = site, site.folder / "standby", engines.free_port()
        words, direct = list(site.server_words), f":{engines.postgres().port}/"
        if proxy is not None:
            site.server_words = [word.replace(direct, f":{proxy.port}/") for word in words]
        site.start_server()
        site.server_words = words
        shutil.copytree(site.server_home / "ca", self.home / "ca")
        self.standby = site._fork("standby", ENTRIES["fedserver"], site.words_of(self.home, self.port), "")
        site.until(lambda: "takes over when it ends" in self.standby.text, "the standby to wait")
        site.addresses = f"localhost:{site.port},localhost:{self.port}"
        site.start_device("fleet")

    def take_over(self, disturb: Callable[[Child], object]) -> Child:
        """Disturb the active server; return it when the standby serves."""
        active, began = self.site.server, time.monotonic()
        disturb(active)
        self.site.until(lambda: "listens on" in self.standby.text, "the standby to serve")
        assert time.monotonic() - began < SERVES_S
        self.site.children["server"], self.site.server_home = self.standby, self.home
        return active


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_takes_over_and_the_bits_are_the_same(tmp_path: Path, in_a_folder: Outcome, number: int) -> None:
    with remote_site(tmp_path) as site:
        pair = Pair(site)
        site.until(closed(site, 1), "a round to close")
        active = pair.take_over(lambda child: child.signal(number))
        if number == signal.SIGSTOP:
            site.children["woken"] = active
            active.signal(signal.SIGCONT)
            site.until(lambda: active.exit is not None, "the old server to end")
            assert active.exit == ServerReplaced.exit_code, active
            assert "another server has taken over" in active.text
        assert rest(site).differences(in_a_folder) == []


def test_a_standby_without_the_noise_secret_is_refused_before_it_waits(tmp_path: Path) -> None:
    with remote_site(tmp_path) as site:
        noisy = ("privacy.unit=client", "privacy.devices=3", "privacy.noise=2.0", "privacy.delta=0.1", "data.classes=[0,1]")
        site.shape = replace(SHAPE, settings=("method.name=fedavg", "model.name=mlr", *noisy))
        site.start_server()
        home = site.folder / "standby"

        def with_copy_of(folder: str) -> Child:
            shutil.copytree(site.server_home / folder, home / folder)
            return site._fork(folder, ENTRIES["fedserver"], site.words_of(home, engines.free_port()), "")

        refused = with_copy_of("ca")
        site.until(lambda: refused.exit is not None, "a standby to end")
        assert refused.exit == HomeMismatch.exit_code
        assert "the noise secret of this server is missing: copy" in refused.text
        waiting = with_copy_of("privacy")
        site.until(lambda: "takes over when it ends" in waiting.text, "a standby to wait")


def test_a_device_that_is_revoked_on_the_waiting_machine_is_cut_off(tmp_path: Path) -> None:
    with remote_site(tmp_path) as site:
        site.shape = replace(SHAPE, settings=(*SHAPE.settings, "round.rounds=1000"))
        pair = Pair(site)
        site.until(closed(site, 1), "a round to close")
        result = CliRunner().invoke(cli, ["revoke", "--home", str(pair.home), "edge-s1"])
        assert result.output == "edge-s1 is revoked\n", result.exception
        began = time.monotonic()
        site.until(lambda: re.search(r"s1: FAILED: .*revoked", site.children["fleet"].text), "the device to be cut off")
        assert time.monotonic() - began < REVOKED_S
        old_home = site.server_home
        pair.take_over(lambda child: child.signal(signal.SIGKILL))
        site.until(lambda: "edge-s2 connected" in pair.standby.text, "the other device to come to the new server")
        result = CliRunner().invoke(cli, ["revoke", "--home", str(old_home), "edge-s2"])
        assert result.output == "edge-s2 is revoked\n", result.exception
        began = time.monotonic()
        site.until(lambda: re.search(r"s2: FAILED: .*revoked", site.children["fleet"].text), "that device to be cut off, too")
        assert time.monotonic() - began < REVOKED_S


def close_the_way(proxy: Proxy) -> Callable[[], None]:
    """Reset the connections to the database, and refuse new ones; return what opens the way again."""
    way, proxy.to = proxy.to, engines.free_port()
    proxy.cut_all()
    return lambda: setattr(proxy, "to", way)


def stall_the_way(proxy: Proxy) -> Callable[[], None]:
    """Let no byte and no end of a connection through; return what opens the way again."""
    proxy.silence(math.inf)
    return lambda: proxy.silence(0.0)


@pytest.mark.parametrize("cut", [close_the_way, stall_the_way])
def test_a_server_that_is_cut_off_from_the_database_is_replaced(
    tmp_path: Path, in_a_folder: Outcome, cut: Callable[[Proxy], Callable[[], None]]
) -> None:
    with remote_site(tmp_path) as site, closing(Proxy(engines.postgres().port)) as proxy:
        pair, opened = Pair(site, proxy), list[Callable[[], None]]()
        site.until(closed(site, 1), "a round to close")
        old = site.children["old"] = pair.take_over(lambda child: opened.append(cut(proxy)))
        fleet = site.children["fleet"]
        site.until(lambda: fleet.exit is not None, "the devices to go on with the other server")
        opened[0]()
        site.until(lambda: old.exit is not None, "the old server to end")
        assert old.exit == ServerReplaced.exit_code, old
        assert "another server has taken over" in old.text
        assert rest(site).differences(in_a_folder) == []


def test_a_command_that_needs_the_federation_for_itself_is_refused_on_every_machine(tmp_path: Path) -> None:
    with remote_site(tmp_path) as site:
        site.start_server()
        other = ServerHome(tmp_path / "other", StoragePlace(site.server_words[1], site.server_words[3]))
        with pytest.raises(HomeBusy, match="a server already runs on the database"), other.locked():
            pass
