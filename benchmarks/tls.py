"""Speed of a plain TLS socket of Python's ssl module on this machine: the yardstick for a transfer."""

from __future__ import annotations

import multiprocessing
import socket
import ssl
import tempfile
import time
from pathlib import Path

from attune.common.identity.credential import server_name
from attune.fedserver.identity.authority import Authority

CHUNK_BYTES = 1 << 20


def _receive(listener: socket.socket, certificate: Path, key: Path, total_bytes: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    raw, _ = listener.accept()
    buffer = bytearray(CHUNK_BYTES)
    with context.wrap_socket(raw, server_side=True) as end:
        left = total_bytes
        while left > 0 and (count := end.recv_into(buffer)):
            left -= count
        end.sendall(b"x")


def raw_tls_bytes_per_s(total_bytes: int = 1 << 29) -> float:
    """Measure one connection over loopback between two processes, in one direction, until the peer has received everything."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        authority = Authority.create(Path(folder) / "authority")
        server = authority.issue_server()
        certificate, key = Path(folder) / "server.pem", Path(folder) / "server.key"
        certificate.write_bytes(server.certificate_pem)
        key.write_bytes(server.key_pem)
        receiver = multiprocessing.get_context("fork").Process(target=_receive, args=(listener, certificate, key, total_bytes))
        receiver.start()
        context = ssl.create_default_context(cadata=authority.certificate_pem.decode())
        chunk = bytes(CHUNK_BYTES)
        with (
            socket.create_connection(listener.getsockname()) as raw,
            context.wrap_socket(raw, server_hostname=server_name(authority.certificate_pem)) as end,
        ):
            started = time.monotonic()
            for _ in range(total_bytes // CHUNK_BYTES):
                end.sendall(chunk)
            end.recv(1)
            seconds = time.monotonic() - started
        receiver.join(10)
    return total_bytes / seconds
