"""A small HTTP proxy as a process of its own: CONNECT alone, as hospitals have it.

Every host name stands for this machine, so a device whose server is called `federation.invalid` can reach it by no other way.
Each line of its log is a host and port that somebody asked for, with the answer; it is written before the answer goes out.
"""

import argparse
import base64
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class ConnectHandler(BaseHTTPRequestHandler):
    """One connection. `options` are those of the command line."""

    protocol_version = "HTTP/1.1"
    options: Any = None

    def do_CONNECT(self) -> None:
        code = self._answer()
        if code != 200:
            self._say(code)
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            there = socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2])), timeout=10)
        except OSError:
            self._say(502)
            self.send_error(502)
            return
        self._say(200)
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        if self.options.opens_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.options.opens_tls)
            with contextlib.suppress(OSError), context.wrap_socket(self.connection, server_side=True) as opened:
                opened.recv(1)
            return
        there.settimeout(None)
        back = threading.Thread(target=copy, args=(there, self.connection), daemon=True)
        back.start()
        copy(self.connection, there)
        back.join()
        there.close()

    def _answer(self) -> int:
        if self.options.answer != 200:
            return int(self.options.answer)
        given = self.headers.get("Proxy-Authorization", "").removeprefix("Basic ")
        wanted = base64.b64encode(self.options.credentials.encode()).decode()
        return 407 if self.options.credentials and given != wanted else 200

    def _say(self, code: int) -> None:
        with Path(self.options.log).open("a") as log:
            log.write(f"{self.path} {code}\n")

    def log_message(self, *words: object) -> None:
        """No-op: `_say` writes what tests read."""


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side closes, then end the other direction's wait."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class ConnectProxy:
    """A running proxy: its HOST:PORT, and its log."""

    address: str
    log: Path

    @property
    def asked(self) -> list[str]:
        """Target that was asked for, such as "federation.invalid:50051 200"."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@contextlib.contextmanager
def connect_proxy(folder: Path, *words: str) -> Iterator[ConnectProxy]:
    """Run a proxy with these words of the command line; its log lies in the folder."""
    log = folder / "proxy.log"
    command = [sys.executable, str(Path(__file__)), "--log", str(log), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield ConnectProxy(process.stdout.readline().strip(), log)
        finally:
            process.kill()


def certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate that a proxy makes for itself, as one that opens TLS does."""
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    from attune.common.identity.credential import key_pem

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Hospital Web Filter CA")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
    path = folder / "filter.pem"
    path.write_bytes(key_pem(key) + made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--credentials", default="")
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--opens-tls", default="")
    ConnectHandler.options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), ConnectHandler)
    server.daemon_threads = True
    print(f"127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
