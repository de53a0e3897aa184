"""Direct transfers: devices read and write S3 themselves, with the bits of streams, whatever is killed or stands still."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attune.fedclient.disclosure_log import FILE, read_log
from tests import engines
from tests.chaos.site import Outcome, Shape, Site
from tests.e2e.test_remote_storage import closed, rest

pytestmark = pytest.mark.engines
PATIENCE_S = 180.0
SETTINGS = ("model.name=mlr", "round.rounds=3", "train.local_steps=3", "server.inline_bytes=0")
SHAPES = {method: Shape(method, 2, (f"method.name={method}", *SETTINGS), hosted=True) for method in ("fedavg", "fedmcsa")}
DIRECT = ("server.transfer=direct",)


def site_of(folder: Path, shape: Shape, *settings: str) -> Site:
    words = engines.remote_words()
    site = Site(folder / "site", replace(shape, settings=(*shape.settings, *settings)), PATIENCE_S)
    site.server_words, site.device_words = words, ["--direct-host", engines.weed().address]
    return site


def run(site: Site, disturb: Callable[[Site], None] = lambda site: None) -> Outcome:
    site.start_server()
    site.start_device("fleet")
    disturb(site)
    return rest(site)


@pytest.fixture(scope="module", params=SHAPES)
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shape, Outcome]:
    shape = SHAPES[request.param]
    with Site(tmp_path_factory.mktemp("folder") / "site", shape, PATIENCE_S) as site:
        return shape, run(site)


def asked(site: Site, kind: str) -> int:
    """Return how many messages of a kind all devices have sent."""
    logs = [read_log(path) for path in sorted(site.devices_home.glob(f"*/{FILE}"))]
    return sum(line.count for log in logs for line in log.messages if line.kind == kind)


def test_the_bits_are_those_of_streams_and_no_blob_comes_by_one(tmp_path: Path, streamed: tuple[Shape, Outcome]) -> None:
    shape, expected = streamed
    with site_of(tmp_path, shape, *DIRECT) as site:
        assert run(site).differences(expected) == []
        assert asked(site, "question where a part goes") >= 12
        text = "".join(log.read_text() for log in site.logs)
        assert not re.search("X-Amz|go through the server", text), text


@pytest.mark.parametrize("setting", ["method.name=fedtp", "round.served=zstd"])
def test_what_is_made_in_the_server_has_the_bits_of_streams(tmp_path: Path, setting: str) -> None:
    model = ("model.name=transformer", "model.width=8", "model.depth=1", "model.heads=2") if "fedtp" in setting else ()
    shape = replace(SHAPES["fedavg"], settings=(*SHAPES["fedavg"].settings, setting, *model))
    with Site(tmp_path / "folder", shape, PATIENCE_S) as site:
        expected = run(site)
    with site_of(tmp_path, shape, *DIRECT) as site:
        assert run(site).differences(expected) == []


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with Site(tmp_path_factory.mktemp("fedavg") / "site", SHAPES["fedavg"], PATIENCE_S) as site:
        return run(site)


@pytest.mark.parametrize(("group", "fault"), [("server", "server:2:upload-whole=kill"), ("fleet", "edge-s1:2:uploaded=kill")])
def test_a_kill_between_arrival_and_receipt_loses_nothing(tmp_path: Path, fedavg: Outcome, group: str, fault: str) -> None:
    with site_of(tmp_path, SHAPES["fedavg"], *DIRECT) as site:
        killed = site.start_server(fault if group == "server" else "")
        fleet = site.start_device("fleet", fault if group == "fleet" else "")
        killed = killed if group == "server" else fleet
        site.until(lambda: killed.exit is not None, "the process to be killed")
        assert killed.exit == -signal.SIGKILL, killed
        if group == "server":
            site.start_server()
        else:
            site.start_device("fleet")
        assert rest(site).differences(fedavg) == []


def test_a_device_that_is_killed_while_the_store_stands_still_goes_on(tmp_path: Path, fedavg: Outcome) -> None:
    with site_of(tmp_path, SHAPES["fedavg"], *DIRECT) as site:
        site.start_server()
        fleet = site.start_device("fleet")
        site.until(closed(site, 1), "a round to close")
        store = engines.weed().process
        assert store is not None
        store.send_signal(signal.SIGSTOP)
        try:
            fleet.signal(signal.SIGKILL)
            site.until(lambda: fleet.exit is not None, "the fleet to be gone")
        finally:
            store.send_signal(signal.SIGCONT)
        site.start_device("fleet")
        assert rest(site).differences(fedavg) == []


def test_a_site_that_allows_only_the_one_port_uses_streams_and_says_so_once(tmp_path: Path, fedavg: Outcome) -> None:
    closed_port = f"http://127.0.0.1:{engines.free_port()}"
    with site_of(tmp_path, SHAPES["fedavg"], *DIRECT, f"server.direct_url={closed_port}") as site:
        site.device_words = ["--direct-host", closed_port]
        assert run(site).differences(fedavg) == []
        assert site.children["fleet"].text.count("blobs go through the server for 15 minutes") == SHAPES["fedavg"].devices
