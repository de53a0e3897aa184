"""HTTP/2 headers without end (CONTINUATION), from the holder of a token, a device, and a device that is revoked."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from attune.common.identity.credential import Credential
from attune.common.identity.token import JoinToken
from tests.attacks.conftest import Victim
from tests.e2e.harness import Server

MOST_SENT = 512 << 20  # bytes that one connection gets rid of before it is dropped, on a slow machine
MOST_GROWTH_KB = 400_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, CONTINUATION = 4, 1, 9


def frame(kind: int, stream: int, data: bytes) -> bytes:
    """Return a frame without flags: a block of headers that goes on."""
    return len(data).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + data


def field(name: bytes, value: bytes) -> bytes:
    """Return a literal header in HPACK, without a place in the table."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


FIRST = b"\x83\x87" + field(b":path", b"/attune.v1.Federation/Submit") + field(b"content-type", b"application/grpc")
MORE = b"".join(frame(CONTINUATION, 1, field(b"a" * 100, b"b" * 120) * 60) for _ in range(10))


def connect(port: int, credential: Credential, folder: Path) -> ssl.SSLSocket:
    folder.mkdir()
    (folder / "key.pem").write_bytes(credential.key_pem)
    (folder / "certificate.pem").write_bytes(credential.certificate_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10))


def resident_kb(server: Server) -> int:
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(server.popen.pid)], capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not count bytes")
@pytest.mark.parametrize("who", ["token", "device", "revoked device"])
def test_headers_without_end_are_cut_off(victim: Victim, who: str) -> None:
    if who == "token":
        credential = JoinToken.parse(victim.server.join_token).bootstrap()
    else:
        mallory = victim.stranger()
        credential = mallory.credential
        if who == "revoked device":
            victim.federation.command("fedserver", "revoke", mallory.name)
        mallory.close()
    before, sent = resident_kb(victim.server), 0
    held = connect(victim.server.port, credential, victim.scratch())
    with contextlib.suppress(OSError):
        held.sendall(PREFACE + frame(SETTINGS, 0, b"") + frame(HEADERS, 1, FIRST))
        while sent < MOST_SENT:
            held.sendall(MORE)
            sent += len(MORE)
    held.close()
    assert sent < MOST_SENT
    assert resident_kb(victim.server) - before < MOST_GROWTH_KB
