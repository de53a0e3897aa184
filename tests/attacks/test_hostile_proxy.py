"""A proxy (`--proxy`) that answers garbage, without end, slowly, with a redirect, or with text for the terminal."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from attune.common.errors import Unreachable
from attune.fedclient.address import Proxy, ServerAddress

TARGET = ServerAddress("server.invalid", 50051)
WITHIN_S = 1.0
PATIENCE_S = 60.0
OPENED = b"HTTP/1.1 200 OK\r\n"


def repeated(first: bytes, again: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(pause_s)
        yield again


ANSWERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "garbage": lambda: iter([bytes(range(256)) * 40]),
    "headers without end": lambda: repeated(OPENED, b"X-Header: " + b"a" * 1000 + b"\r\n"),
    "a line without end": lambda: repeated(b"HTTP/1.1 200 ", b"a" * 1000),
    "slowly": lambda: repeated(b"H", b"T", 0.1),
    "headers, slowly": lambda: repeated(OPENED, b"X: y\r\n", 0.1),
    "nothing": lambda: repeated(b"", b"", 0.1),
    "a redirect": lambda: iter([b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n"]),
    "text for a terminal": lambda: iter([b"HTTP/1.1 403 \x1b[2J\x1b]0;owned\x07\xff" + b"a" * 5000 + b"\r\n\r\n"]),
    "more after the answer": lambda: iter([OPENED + b"\r\nSSH-2.0-OpenSSH\r\n"]),
    "the end": lambda: iter([b""]),
    "half an answer": lambda: iter([b"HTTP/1.1 200"]),
}


@contextlib.contextmanager
def hostile(answer: Callable[[], Iterator[bytes]]) -> Iterator[Proxy]:
    """Run a proxy that answers every connection so, until the peer hangs up."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                talk(listening.accept()[0])

    def talk(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.recv(4096)
            for piece in answer():
                if over.is_set():
                    return
                peer.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        try:
            yield Proxy("127.0.0.1", listening.getsockname()[1], "ana:geheim")
        finally:
            over.set()


def ended(work: Callable[[], object]) -> BaseException:
    """Return the error with which the work ends, in a thread, because some never did."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    assert not thread.is_alive(), "it never ends"
    assert errors, "it was believed"
    return errors[0]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_connection_through_a_hostile_proxy_ends_with_plain_words(kind: str) -> None:
    with hostile(ANSWERS[kind]) as proxy:
        error = ended(lambda: proxy.connect(TARGET, WITHIN_S))
    assert type(error) is Unreachable and str(proxy) in str(error)
    assert str(error).isprintable() and len(str(error)) < 400 and "geheim" not in str(error), str(error)


def test_what_opens_the_way_and_says_no_more_is_a_proxy() -> None:
    answers = iter([iter([b"HTTP/1.0 200 Connection established\r\nVia: x\r\n\r\n", b""])])
    with hostile(lambda: next(answers)) as proxy, proxy.connect(TARGET, PATIENCE_S) as opened:
        assert opened.recv(1) == b""
