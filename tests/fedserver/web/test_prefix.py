"""The page behind a proxy that maps a path such as /fl/ to it: every address that it asks for lies below the path."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import pytest

from attune.common.config import ServerSettings
from attune.fedserver.core.messages import Record
from attune.fedserver.federation.planner import PLANNING
from attune.fedserver.federation.steps import DOOR, STORES, Troubles
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import status
from attune.fedserver.web import pages
from attune.fedserver.web.facts import PageFacts
from attune.fedserver.web.sources import FaultFeed, RunningServer
from tests.fedserver.web.conftest import TOKEN, Source

LINK = re.compile(r'(?:href|src)="([^"#]+)"')
IMPORT = re.compile(r'from "([^"]+)"')
CALL = re.compile(r"""\b(?:ask|request|follow|fetch|EventSource)\(\s*["'`]([^"'`$?]*/[^"'`$?]*)""")


@pytest.mark.parametrize(
    "opened", ["https://fed.example/", "https://fed.example/fl/", "https://hub.example/user/ada/proxy/50052/"]
)
def test_every_address_of_the_page_lies_below_its_path(served, opened):
    page = served(Source(PageFacts("server", status(Snapshot(None, None, Record(), (), (), ()), set()), [])))
    prefix = urlsplit(opened).path

    def ask(address: str, **more: str):
        parts = urlsplit(address)
        assert parts.netloc == urlsplit(opened).netloc and parts.path.startswith(prefix), address
        query = f"?{parts.query}" if parts.query else ""
        return page.ask(f"/{parts.path.removeprefix(prefix)}{query}", **more)

    entered = ask(f"{opened}?token={TOKEN}&unit=a")
    assert entered.status == 303
    address = urljoin(opened, entered.headers["location"])
    assert address == f"{opened}?unit=a#token={TOKEN}"
    assert urljoin(opened, ask(f"{opened}?token={TOKEN}").headers["location"]) == f"{opened}#token={TOKEN}"
    links = [urljoin(address, link) for link in LINK.findall(ask(address, token=TOKEN).text)]
    scripts = {link for link in links if link.endswith(".js")}
    assert len(links) >= 4 and scripts
    seen: dict[str, str] = {}
    while more := scripts - seen.keys():
        for script in more:
            answer = ask(script, token=TOKEN)
            assert answer.status == 200, script
            seen[script] = answer.text
            scripts |= {urljoin(script, name) for name in IMPORT.findall(seen[script])}
    assert all(ask(link, token=TOKEN).status == 200 for link in links)
    called = {urljoin(address, path) for text in seen.values() for path in CALL.findall(text)}
    assert called == {f"{opened}api/{name}" for name in ("events", "attention", "actions/")}


# --- the address of a home's page is known only where the page was served


def test_a_page_has_an_address_once_it_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ServerHome(tmp_path)
    home.create()
    assert pages.page_url(home, "secret") is None
    settings = SimpleNamespace(server=SimpleNamespace(advertise="here:1"))
    monkeypatch.setattr(ServerHome, "snapshot", lambda _: SimpleNamespace(settings=settings))
    place = SimpleNamespace(url=lambda token, advertise: f"https://there/{advertise}#{token}")
    monkeypatch.setattr(pages, "remembered", lambda _: place)
    assert pages.page_url(home, "secret") == "https://there/here:1#secret"


# --- readiness, by which a load balancer chooses a server: only what keeps all devices out takes it away


@pytest.mark.parametrize("step", [PLANNING, "opening a round", "closing a round", "two processes use the identity of kiel"])
def test_a_round_that_waits_for_devices_lets_devices_in(step: str) -> None:
    """Behind a load balancer, a server that is not ready would never get the devices that it waits for."""
    server, troubles = _running()
    troubles.set(step, "2 devices are missing")
    assert server.trouble() == "" and len(server.troubles) == 1


@pytest.mark.parametrize("step", [DOOR, *STORES])
def test_a_server_that_can_let_nobody_in_is_not_ready(step: str) -> None:
    server, troubles = _running()
    troubles.set(step, "lost")
    assert server.trouble() == f"{step}: lost"
    troubles.clear(step)
    assert server.trouble() == ""


def _running() -> tuple[RunningServer, Troubles]:
    troubles = Troubles()
    state = SimpleNamespace(troubles=troubles, activity=None, settings=SimpleNamespace(server=ServerSettings()))
    coordinator: Any = SimpleNamespace(state=state, error=None, stuck_s=0.0)
    return RunningServer(cast("Any", coordinator), "localhost:1", FaultFeed()), troubles
