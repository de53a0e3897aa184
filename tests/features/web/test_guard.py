"""Permissions of the page: every request is sent over a real connection, with exactly these headers."""

import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.features.web.facts import PageFacts
from attune.features.web.guard import Guard
from attune.features.web.page_tokens import Keyring
from attune.features.web.pages import Actions
from attune.features.web.serving import PageAddress, names_of
from attune.fedserver.core.messages import Record
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import status
from tests.features.web.conftest import TOKEN, Source

EMPTY = PageFacts("server", status(Snapshot(None, None, Record(), (), (), ()), set()), [])
ALL = ("/", "/page/main.js", "/api/view", "/api/events", "/api/attention", "/metrics")


@pytest.fixture
def page(served):
    return served(Source(EMPTY))


@pytest.mark.parametrize("path", ALL)
def test_nothing_is_shown_without_the_token(page, path):
    assert page.ask(path).status == 401
    assert page.ask(path, token="another").status == 401
    assert page.ask(path, cookie=f"attune-{page.port}=another").status == 401
    assert page.ask(path, cookie="attune-1=x; ;;=\x7f").status == 401
    assert page.ask(f"{path}?token={TOKEN}").status == (303 if path == "/" else 401)


def test_the_cookie_opens_the_files_of_the_page_and_nothing_else(page):
    """Browsers send cookies to all ports of a host: whoever listens on another port has this one."""
    answer = page.ask(f"/?token={TOKEN}&unit=a")
    cookie = answer.headers["set-cookie"]
    assert answer.headers["location"] == f"./?unit=a#token={TOKEN}"
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    stolen = cookie.partition(";")[0]
    assert [page.ask(path, cookie=f"a=b; {stolen}").status for path in ("/", "/page/main.js")] == [200, 200]
    assert {page.ask(path, cookie=stolen).status for path in ALL if not path.startswith("/page") and path != "/"} == {401}
    assert page.ask("/api/view", token=stolen.partition("=")[2]).status == 401
    assert page.ask("/", "POST", {}, cookie=stolen).status == 401
    assert page.ask("/?token=another").status == 401


def test_the_token_alone_opens_what_programs_read(page):
    assert {page.ask(path, token=TOKEN).status for path in ALL if path != "/api/events"} == {200}


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/api/view"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example", "localhost.evil"]
)
def test_a_name_that_strangers_can_point_here_is_refused(page, path, host):
    """Try DNS rebinding: the page of evil.example asks this port under its own name."""
    assert page.ask(path, token=TOKEN, host=host).status == 421


@pytest.mark.parametrize("host", ["localhost:{}", "LOCALHOST:{}", "127.0.0.1:{}", "[::1]:{}", "127.0.0.1"])
def test_names_of_this_machine_are_answered(page, host):
    assert page.ask("/healthz", host=host.format(page.port)).status == 200


def test_a_place_elsewhere_is_answered_under_its_own_name_too():
    assert names_of("fed.example") >= {"fed.example", "localhost"}
    assert names_of("127.0.0.1") == {"localhost"}
    assert PageAddress.parse("10.0.0.1:80") == PageAddress("10.0.0.1", 80)
    assert PageAddress.parse("80") == PageAddress("127.0.0.1", 80)
    assert PageAddress.parse("[::1]:80") == PageAddress("::1", 80)
    for wrong in ("", "on", "host:", "1:2:x", "70000"):
        with pytest.raises(SettingError, match="dashboard"):
            PageAddress.parse(wrong)


def test_every_answer_has_the_headers_that_keep_strangers_out(page):
    for answer in (page.ask("/"), page.ask("/", token=TOKEN), page.ask("/healthz"), page.ask("/healthz", host="evil.example")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"


@pytest.fixture
def acting(served, loop):
    """Serve a page with one button. Return the page, and the list of requests that the button noted."""
    done = []

    async def revoke(asked, by):
        done.append(asked.name)
        return {"said": f"{asked.name} is revoked"}

    return served(Source(EMPTY), Actions({"revoke": revoke}, loop)), done


def test_another_sites_page_cannot_press_a_button(acting):
    page, done = acting
    cookie = page.ask(f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    post = {"path": "/api/actions/revoke", "method": "POST", "body": {"name": "anna"}}
    own = f"http://{page.own}"
    for origin in (None, own, "http://evil.example", "null"):
        sent = {} if origin is None else {"origin": origin}
        assert page.ask(**post, cookie=cookie, **sent).status == 401
        assert page.ask(**post, cookie=f"attune-{page.port}={TOKEN}", **sent).status == 401
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{page.port + 1}"):
        assert page.ask(**post, token=TOKEN, origin=origin).status == 403
    assert page.ask(**post, token=TOKEN, origin=own, sec_fetch_site="same-site").status == 403
    assert page.ask("/api/actions/revoke", token=TOKEN).status == 405, "a link, or a picture's address"
    assert done == []
    assert page.ask(**post, token=TOKEN, origin=own, sec_fetch_site="same-origin").status == 200
    assert page.ask(**post, token=TOKEN).status == 200
    assert done == ["anna", "anna"]


def test_actions_that_cannot_be_are_refused_in_words(acting):
    page, done = acting
    for name, body, words in (
        ("pause", {}, "cannot pause"), ("nothing", {}, "cannot nothing"), ("revoke", {}, "name"), ("revoke", [], "object"),
        ("revoke", {"name": "a", "more": 1}, "more"),
    ):  # fmt: skip
        answer = page.ask(f"/api/actions/{name}", "POST", body, token=TOKEN)
        assert answer.status == 400
        assert words in answer.text
    assert page.ask("/api/actions/revoke", "POST", {"name": "x" * 20_000}, token=TOKEN).status == 413
    assert done == []


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "nothing.js", "%2e%2e/guard.py"])
def test_no_other_file_can_be_fetched(page, name):
    assert page.ask(f"/page/{name}", token=TOKEN).status == 404


def test_health_and_readiness_say_why_not(served):
    well, ill = served(Source(EMPTY)), served(Source(EMPTY, why="the disk is full", stands="a step stands still"))
    assert [(well.ask(path).status, well.ask(path).text) for path in ("/healthz", "/readyz")] == [(200, "ok\n")] * 2
    assert (ill.ask("/healthz").status, ill.ask("/healthz").text) == (503, "a step stands still\n")
    assert (ill.ask("/readyz").status, ill.ask("/readyz").text) == (503, "the disk is full\n")


def test_a_socket_that_speaks_no_http_is_left_alone():
    """Send a lifespan or web socket, as Starlette calls them, which must end at the guard."""
    called = []
    aio.run(Guard(called.append, Keyring(TOKEN), (), 1)({"type": "websocket"}, None, None))
    assert called == []
