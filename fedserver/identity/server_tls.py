"""The server's side of mutual TLS: which peers the next handshake accepts, and who the peer of a call is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import grpc

from attune.common.errors import Forbidden
from attune.common.identity.client_tls import BOTH_SIDES, KEEPALIVE_S
from attune.common.identity.credential import Credential, fingerprint_of

TLS_RECORD_BYTES = 8 << 10  # longest record that the server sends
MAX_STREAMS = 64  # calls on one connection; a device needs a few
HANDSHAKES_PASS_S = 0.25  # longer than a handshake needs, on a busy machine too, to take hold of the configuration


class LiveServerCredentials:
    """Credentials of one port that requires a client certificate, whose trust roots and certificate change while it serves.

    Open connections are not touched by a change: who must go at once is refused by fingerprint, call by call. With a change
    the core forgets its session-ticket keys, so no session is resumed under other roots than those it began under.
    """

    def __init__(self, roots_pem: Sequence[bytes], server: Credential) -> None:
        self._shown = self._wanted = (tuple(roots_pem), server)
        self.handshakes = 0  # that have begun
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(roots_pem, server), self._fetch, require_client_authentication=True
        )

    def update(self, roots_pem: Sequence[bytes], server: Credential) -> None:
        """Accept peers under one of `roots_pem`, and show `server`, from the next handshake on. Any thread may call it.

        Raises:
            ValueError: The list is empty, which gRPC would take for "trust the system's public authorities".
        """
        _check(roots_pem)
        self._wanted = (tuple(roots_pem), server)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Answer gRPC at a handshake: the configuration, or None if it has not changed. gRPC asks in a thread, under a lock.

        The core frees the old configuration as soon as this returns a new one, while a handshake that has asked just before
        may still be about to use it: the process would crash (grpc issue 36693). Those get time to get past that point; the
        core's lock keeps others from coming in between.
        """
        self.handshakes += 1
        if self._wanted == self._shown:
            return None
        time.sleep(HANDSHAKES_PASS_S)
        self._shown = self._wanted
        return _configuration(*self._shown)


def _check(roots_pem: Sequence[bytes]) -> None:
    if not roots_pem:
        raise ValueError("mutual TLS needs at least one trust root")


def _configuration(roots_pem: Sequence[bytes], server: Credential) -> grpc.ServerCertificateConfiguration:
    _check(roots_pem)
    pairs = [(server.key_pem, server.certificate_pem)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=b"".join(roots_pem))


def server_options(handshake_s: float = 10.0, connections: int = 0) -> list[tuple[str, int]]:
    """Return options for `grpc.aio.server` that fit the clients' `channel_options`.

    Args:
        handshake_s: Seconds that a handshake may take.
        connections: Connections at most; 0: no limit.
    """
    bound = [("grpc.max_allowed_incoming_connections", connections)] if connections else []
    return [
        *bound,
        # Without this, the core waits two minutes for a peer that connects and sends nothing.
        ("grpc.server_handshake_timeout_ms", round(handshake_s * 1000)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # The core keeps a buffer of this size for each connection. Its default of 16 KiB makes no download faster.
        ("grpc.tsi.max_frame_size", TLS_RECORD_BYTES),
        # Without this, gRPC shares a port that another process uses, without an error.
        ("grpc.so_reuseport", 0),
        # A compressed message would count with more bytes than came over the wire (rpc/unread_bytes.py).
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        *BOTH_SIDES,
        # With gRPC's default of 5 minutes the server would cut clients whose stream is silent but alive.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ]


def peer_fingerprint(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Return the lower hex SHA-256 of the peer's leaf certificate (DER), from `context.auth_context()`.

    Raises:
        Forbidden: The peer has none.
    """
    for pem in auth_context.get("x509_pem_cert", ()):
        return fingerprint_of(pem)
    raise Forbidden("This call came without a client certificate. Connect over mutual TLS, as fedclient does.")
