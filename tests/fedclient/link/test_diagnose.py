"""Each reason why a connection fails gets its own error."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, TokenRefused, Unreachable
from attune.common.identity.credential import Credential, server_name, short_form
from attune.common.identity.token import JoinToken
from attune.fedclient.link import diagnose as diagnosis
from attune.fedclient.link.diagnose import diagnose
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials


def diagnosed_against(
    serve: Any, live: LiveServerCredentials, root_pem: bytes, credential: Credential, **options: Any
) -> AttuneError:
    async def scenario() -> AttuneError:
        async with serve(live) as served:
            found = await asyncio.to_thread(diagnose, "127.0.0.1", served.port, root_pem, credential, 5.0, **options)
            assert served.callers == []
            return found

    return aio.run(scenario())


@contextmanager
def _listener(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[int]]]:
    """Run a TCP server that gives each connection to `answer`. Yield its port, and a list that grows with each connection."""
    accepted: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                accepted.append(connection.fileno())
                answer(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1], accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("days_away", [-40, 40])
def test_own_dates_are_named_beside_a_server_that_is_away(authority: Authority, device: Any, days_away: int) -> None:
    credential = device(authority, days=30, now=datetime.now(timezone.utc) + timedelta(days=days_away))
    found = diagnose("host.invalid", 1, authority.certificate_pem, credential, 5.0)
    assert type(found) is Unreachable, "the server may find them good: one of the clocks may be wrong"
    assert ("expired" if days_away < 0 else "clock") in str(found) and "host.invalid" in str(found)


def test_nobody_there(authority: Authority, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_context", lambda *_: pytest.fail("a fleet would make one for each device and try"))
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    found = diagnose("127.0.0.1", port, authority.certificate_pem, device(authority), 5.0)
    assert type(found) is Unreachable
    assert "Nobody listens" in str(found)


@pytest.mark.parametrize("host", ["host.invalid", "x" * 70])
def test_unknown_host(authority: Authority, device: Any, host: str) -> None:
    found = diagnose(host, 50051, authority.certificate_pem, device(authority), 5.0)
    assert type(found) is Unreachable
    assert f"{host!r}, cannot be resolved" in str(found)


def test_a_server_that_hangs(authority: Authority, device: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = diagnose("127.0.0.1", silent.getsockname()[1], authority.certificate_pem, device(authority), 0.2)
    assert type(found) is Unreachable
    assert "does not answer" in str(found)


def test_something_else_on_the_port(authority: Authority, device: Any) -> None:
    with _listener(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 3)) as (port, _):
        found = diagnose("127.0.0.1", port, authority.certificate_pem, device(authority), 5.0)
    assert type(found) is Unreachable
    assert "does not speak TLS" in str(found)


def test_a_proxy_without_its_server(authority: Authority, device: Any) -> None:
    with _listener(lambda connection: connection.recv(1 << 16) and None) as (port, _):
        found = diagnose("127.0.0.1", port, authority.certificate_pem, device(authority), 5.0)
    assert type(found) is Unreachable
    assert "proxy" in str(found)


@pytest.mark.parametrize("closed_first", [1, 2, 3])
def test_only_three_closed_handshakes_say_something_about_dates(
    authority: Authority, device: Any, tmp_path: Path, closed_first: int
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue_server().save(tmp_path))
    handshakes: list[bool] = []

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            handshakes.append(len(handshakes) >= closed_first)
            if handshakes[-1]:
                secure.sendall(b"settings")

    with _listener(answer) as (port, _):
        found = diagnose("127.0.0.1", port, authority.certificate_pem, device(authority), 5.0)
    assert len(handshakes) == min(closed_first + 1, 3)
    assert type(found) is Unreachable and ("clock" in str(found)) is (closed_first == 3)


def test_a_server_that_is_back(authority: Authority, live: LiveServerCredentials, device: Any, serve: Any) -> None:
    found = diagnosed_against(serve, live, authority.certificate_pem, device(authority))
    assert type(found) is Unreachable
    assert "there again" in str(found)


def test_a_devices_certificate_that_the_server_refuses(
    authority: Authority, stranger: Authority, live: LiveServerCredentials, device: Any, serve: Any
) -> None:
    found = diagnosed_against(serve, live, authority.certificate_pem, device(stranger))
    assert type(found) is CertificateRefused
    assert "fedclient join" in str(found)


def test_a_token_that_the_server_does_not_know(authority: Authority, live: LiveServerCredentials, serve: Any) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    found = diagnosed_against(serve, live, token.trust_anchor_pem(), token.bootstrap(), bootstrap=True)
    assert type(found) is TokenRefused


def test_a_token_that_the_server_knows(authority: Authority, serve: Any) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    roots = [authority.certificate_pem, token.bootstrap().certificate_pem]
    live = LiveServerCredentials(roots, authority.issue_server())
    found = diagnosed_against(serve, live, token.trust_anchor_pem(), token.bootstrap(), bootstrap=True)
    assert type(found) is Unreachable


def test_the_wrong_server(authority: Authority, stranger: Authority, device: Any, serve: Any) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    for root_pem, credential in (
        (authority.certificate_pem, device(authority)),
        (token.trust_anchor_pem(), token.bootstrap()),
    ):
        live = LiveServerCredentials([authority.certificate_pem], stranger.issue_server())
        found = diagnosed_against(serve, live, root_pem, credential)
        assert type(found) is FingerprintMismatch
        assert short_form(authority.certificate_pem) in str(found)


def test_a_device_in_the_servers_place(authority: Authority, device: Any, serve: Any) -> None:
    live = LiveServerCredentials([authority.certificate_pem], device(authority, server_name(authority.certificate_pem)))
    found = diagnosed_against(serve, live, authority.certificate_pem, device(authority))
    assert type(found) is FingerprintMismatch


def test_a_servers_certificate_out_of_date_may_pass_by_waiting(authority: Authority, device: Any, serve: Any) -> None:
    # It is issued with an hour's allowance for clocks, so its life of minus half an hour is over, but not reversed.
    live = LiveServerCredentials([authority.certificate_pem], authority.issue_server(days=-1 / 48))
    found = diagnosed_against(serve, live, authority.certificate_pem, device(authority))
    assert type(found) is Unreachable
    assert "out of date" in str(found)


def test_the_wrong_server_sees_no_certificate(authority: Authority, stranger: Authority, device: Any, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(stranger.issue_server().save(tmp_path))
    context.load_verify_locations(cadata=authority.certificate_pem.decode())
    context.verify_mode = ssl.CERT_OPTIONAL
    seen: list[str | None] = []

    def answer(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.getpeercert()
                seen.append("the device went on")
        except ssl.SSLError as error:
            seen.append(error.reason)

    with _listener(answer) as (port, _):
        found = diagnose("127.0.0.1", port, authority.certificate_pem, device(authority), 5.0)
    assert type(found) is FingerprintMismatch
    assert seen == ["TLSV1_ALERT_UNKNOWN_CA"]
