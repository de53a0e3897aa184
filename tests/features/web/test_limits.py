"""Limits on the page's port for callers without the token: connections, time, and the size of a request."""

import socket
import time

import pytest

from attune.features.web import guard
from attune.fedserver.process import limit, page_connections
from tests.features.web.conftest import TOKEN, Source
from tests.features.web.test_guard import EMPTY

WAIT_S = 30


def connect(page, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", page.port), timeout=WAIT_S)
    made.sendall(sent)
    return made


def answer(held: socket.socket) -> bytes:
    """Return all bytes until the server ends the connection; a timeout is an error."""
    data = b""
    try:
        while more := held.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.fixture
def page(served):
    return served(Source(EMPTY))


@pytest.fixture
def quick(monkeypatch, served):
    """Serve a page where a request has half a second."""
    monkeypatch.setattr(guard, "REQUEST_S", 0.5)
    return served(Source(EMPTY))


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_the_oldest_connection_without_a_token_makes_room(page, begun):
    """Hold twice as many connections as there may be: the first ones end, and a caller with the token is answered."""
    held = []
    for _ in range(2 * page_connections(limit())):
        held.append(connect(page, begun))
    for first in held[: page_connections(limit())]:
        assert answer(first) == b""
    assert page.ask("/api/view", token=TOKEN).status == 200


@pytest.mark.parametrize("begun", [
    b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /api/actions/x HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer a-token-of-tests\r\nContent-Length: 9\r\n\r\n{",
])  # fmt: skip
def test_a_request_that_does_not_end_in_its_time_is_dropped(quick, begun):
    held = connect(quick, begun)
    assert answer(held) == b""


def test_bytes_that_come_slowly_do_not_prolong_the_time(quick):
    held = connect(quick, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
    held.settimeout(0.05)
    for _ in range(1000):
        try:
            held.sendall(b"a")
            if held.recv(100) == b"":
                return
        except TimeoutError:
            continue
        except OSError:
            return
    raise AssertionError("the connection is still open")


def test_a_caller_without_the_token_keeps_no_connection(page):
    held = connect(page, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert answer(held).startswith(b"HTTP/1.1 200")


def test_a_stream_of_events_outlives_the_time_of_a_request(quick):
    held = connect(quick, b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode())
    held.settimeout(2)
    with pytest.raises(TimeoutError):
        answer(held)


@pytest.mark.parametrize("cookie", ['a="' + "\\" * 60_000 + '"', "a=b;" * 15_000, 'a="' + '\\"' * 30_000 + '"'])
def test_a_long_cookie_is_refused_before_anything_reads_it(page, cookie):
    """Send cookies whose parsing took up to 6.5 s of processor time."""
    held = connect(page, f"GET /api/view HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n".encode())
    assert answer(held)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431")


def test_requests_that_cannot_be_answered_leave_no_line_in_the_log(page, caplog):
    upgrade = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for sent in (upgrade, b"\xff" * 500 + b"\r\n\r\n", b"GET /\r\n\r\n"):
        held = connect(page, sent)
        assert answer(held).startswith(b"HTTP/1.1 4")
    assert caplog.records == []


def test_a_caller_that_hangs_up_within_its_request_leaves_no_traceback(page, caplog):
    held = connect(page, b"POST /api/actions/x HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer a-token-of-tests\r\n")
    held.sendall(b"Content-Length: 9\r\n\r\n{")
    time.sleep(0.3)
    held.close()
    time.sleep(0.3)
    assert page.ask("/healthz").status == 200
    assert not [record for record in caplog.records if record.exc_info]
