"""Roles of the page: the operator's token, viewers and operators by name, and the token that only reads /metrics."""

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import pytest
from click.testing import CliRunner

from attune.common.config import ServerSettings
from attune.common.errors import HomeMismatch, SettingError
from attune.features.web import page_tokens, pages
from attune.features.web.facts import PageFacts
from attune.features.web.page_tokens import Keyring
from attune.features.web.pages import ARGUMENTS, Actions
from attune.features.web.routes import Hub, Routes
from attune.features.web.sources import FaultFeed, RunningServer
from attune.fedserver.cli import cli
from attune.fedserver.core.messages import Record
from attune.fedserver.federation.planner import PLANNING
from attune.fedserver.federation.steps import DOOR, STORES, Troubles
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import status
from tests.features.web.conftest import TOKEN, Source
from tests.features.web.test_guard import EMPTY

METRICS = "a-token-that-reads-metrics"
BODIES = {"token": {}, "revoke": {"name": "anna"}, "pause": {}, "resume": {}}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@pytest.fixture
def home(tmp_path):
    home = ServerHome(tmp_path / "home")
    home.create()
    home.note("made", "test")  # makes the ledger
    return home


@pytest.fixture
def acting(served, home, loop):
    """Serve a page with every button. Return the page, and the list of what the buttons did, with who pressed them."""
    done = []

    def noting(name):
        async def note(asked, by):
            done.append((name, by))
            return {}

        return note

    keys = Keyring(TOKEN, METRICS, home)
    return served(Source(EMPTY), Actions({name: noting(name) for name in ARGUMENTS}, loop), keys), done


def requests():
    """Yield (method, path, body) for every route of the page and for every action, by each method."""
    for route in Routes(Source(EMPTY), Hub(Source(EMPTY)), Actions({}), Keyring(TOKEN)).app().routes:
        names = (ARGUMENTS if "actions" in route.path else ("main.js",)) if "{name}" in route.path else ("",)
        for name in names:
            for method in METHODS:
                yield method, route.path.replace("{name}", name), BODIES.get(name, {})


def test_each_action_has_a_body_in_these_tests():
    assert BODIES.keys() == ARGUMENTS.keys()


def test_a_viewer_sees_everything_and_changes_nothing(acting, home):
    page, done = acting
    viewer = page_tokens.add(home, "anna", "viewer", "operator ops")
    for method, path, body in requests():
        if path == "/api/events":
            continue  # a stream has no end; another test reads it
        answer = page.ask(path, method, body, token=viewer)
        if method in ("GET", "HEAD"):
            assert answer.status == (405 if "actions" in path else 200), (method, path)
        elif path not in ("/healthz", "/readyz"):
            assert answer.status == 403, (method, path)
    assert done == []
    said = json.loads(page.ask("/api/view", token=viewer).text)["caller"]
    assert said == {"name": "anna", "role": "viewer", "actions": []}


def test_an_operator_acts_under_its_name(acting, home):
    page, done = acting
    ben = page_tokens.add(home, "ben", "operator", "operator ops")
    for name in ARGUMENTS:
        assert page.ask(f"/api/actions/{name}", "POST", BODIES[name], token=ben).status == 200
    assert page.ask("/api/actions/pause", "POST", {}, token=TOKEN).status == 200
    assert done == [*((name, "operator ben on the dashboard") for name in ARGUMENTS), ("pause", "operator on the dashboard")]
    assert json.loads(page.ask("/api/view", token=ben).text)["caller"]["actions"] == list(ARGUMENTS)


def test_the_token_for_metrics_reads_metrics_alone(acting):
    page, done = acting
    assert page.ask("/metrics", token=METRICS).text.startswith("# HELP attune_")
    for method, path, body in requests():
        if path not in ("/healthz", "/readyz") and (method, path) not in (("GET", "/metrics"), ("HEAD", "/metrics")):
            assert page.ask(path, method, body, token=METRICS).status == 403, (method, path)
    assert page.ask(f"/?token={METRICS}").status == 401
    assert done == []


def test_a_name_that_is_added_or_removed_counts_at_once_and_ends_its_open_page(acting, home):
    page, _ = acting
    assert page.ask("/api/view", token="x").status == 401
    viewer = page_tokens.add(home, "anna", "viewer", "operator ops")
    assert page.ask(f"/?token={viewer}").status == 303
    ended = []

    def watch():
        ended.append(page.ask("/api/events", token=viewer).text)

    watching = threading.Thread(target=watch)
    watching.start()
    time.sleep(1)
    assert not ended
    page_tokens.remove(home, "anna", "operator ops")
    watching.join(10)
    assert "event: caller" in ended[0]
    assert page.ask("/api/view", token=viewer).status == 401


def test_tokens_are_stored_as_digests_and_compared_in_constant_time(home, monkeypatch):
    token = page_tokens.add(home, "anna", "viewer", "operator ops")
    stored = (home.path / page_tokens.FILE).read_text()
    assert token not in stored
    assert (home.path / page_tokens.FILE).stat().st_mode & 0o777 == 0o600
    assert json.loads(stored)["version"] == 1
    page_tokens.add(home, "ben", "operator", "operator ops")
    compared = []
    monkeypatch.setattr(page_tokens.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    caller = Keyring(TOKEN, METRICS, home).caller_of(token)
    assert (caller.name, caller.role) == ("anna", "viewer")
    assert len(compared) == 4, "every key is compared, so that the time does not tell which came near"


def test_names_are_checked(home):
    page_tokens.add(home, "anna", "viewer", "operator ops")
    with pytest.raises(SettingError, match=r"anna.*remove"):
        page_tokens.add(home, "anna", "operator", "operator ops")
    with pytest.raises(SettingError, match=r"ana.*anna"):
        page_tokens.remove(home, "ana", "operator ops")
    with pytest.raises(SettingError):
        page_tokens.add(home, "an\nna", "viewer", "operator ops")
    assert [(token.name, token.role) for token in page_tokens.listed(home)] == [("anna", "viewer")]


def test_a_damaged_file_admits_nobody_and_is_named(home):
    token = page_tokens.add(home, "anna", "viewer", "operator ops")
    (home.path / page_tokens.FILE).write_text("{}")
    keys = Keyring(TOKEN, METRICS, home)
    assert keys.caller_of(token) is None
    assert keys.caller_of(TOKEN).role == "operator"
    with pytest.raises(HomeMismatch, match=page_tokens.FILE):
        page_tokens.listed(home)
    (home.path / page_tokens.FILE).write_text('{"version":2,"tokens":[]}')
    with pytest.raises(HomeMismatch, match="newer version of fedserver"):
        page_tokens.listed(home)


def test_the_token_for_metrics_is_a_file_of_its_own_that_another_user_may_read(tmp_path):
    path = tmp_path / "shared" / "metrics-token"
    with pytest.raises(SettingError, match=r"metrics_token_file.*shared"):
        page_tokens.metrics_token(path, "0640")
    path.parent.mkdir()
    token = page_tokens.metrics_token(path, "0640")
    assert len(token) >= 32
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_text() == token
    assert page_tokens.metrics_token(path, "0644") == token, "Prometheus has it"
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text("short")
    with pytest.raises(SettingError, match="metrics_token_file"):
        page_tokens.metrics_token(path, "0640")


@pytest.mark.parametrize("mode", ["0660", "0646", "640", "0750", "8888", ""])
def test_a_mode_by_which_others_could_write_is_refused(mode):
    from attune.common.config import ServerSettings, convert

    with pytest.raises(SettingError, match="metrics_token_mode"):
        convert(ServerSettings, {"metrics_token_mode": mode}, "server.")


def test_the_commands_give_list_and_take_tokens_and_the_audit_log_says_so(home):
    ran = CliRunner()
    where = ("--home", str(home.path))
    token = ran.invoke(cli, ["dashboard-token", "add", "anna", "--role", "viewer", *where]).stdout.strip()
    assert Keyring(TOKEN, METRICS, home).caller_of(token) == page_tokens.PageCaller("anna", "viewer")
    assert "anna" in ran.invoke(cli, ["dashboard-token", "list", *where]).stdout
    said = json.loads(ran.invoke(cli, ["dashboard-token", "list", "--json", *where]).stdout)
    assert [(row["name"], row["role"]) for row in said] == [("anna", "viewer")]
    assert ran.invoke(cli, ["dashboard-token", "remove", "anna", *where]).exit_code == 0
    assert Keyring(TOKEN, METRICS, home).caller_of(token) is None
    with home.reading() as reader:
        noted = [(entry.event, entry.facts) for entry, _ in reader.audit()]
    assert noted[1:] == [
        ("dashboard token made", {"name": "anna", "role": "viewer"}),
        ("dashboard token removed", {"name": "anna"}),
    ]


@pytest.mark.parametrize(
    "damage", [b"95wVhsh0xGrL\xfalUc9QPdyGVsWTsCqaDx", b"", b"\x00" * 32, b"short", b"a token with spaces in it"]
)
def test_a_damaged_token_of_the_home_is_replaced_by_a_new_one(home, damage: bytes, caplog) -> None:
    """A flipped byte must not keep the server from starting: the token is the operator's, who sees the new one at the start."""
    path = home.path / page_tokens.OWN_FILE
    path.write_bytes(damage)
    token = page_tokens.own_token(home)
    assert len(token) >= 32 and token.isprintable() and " " not in token
    assert path.read_bytes() == token.encode() and page_tokens.own_token(home) == token
    assert "dashboard-token was damaged" in caplog.text


# --- the page behind a proxy that maps a path such as /fl/ to it: every address that it asks for lies below the path

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
