"""Bytes that a connection has sent and no handler has read, such as headers without end.

The core of gRPC bounds messages and windows, and not what comes between them. So the kernel's count of received bytes is
compared with the bytes of messages. Kernels other than Linux have no such count; there these bytes are not bounded.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

BEFORE_A_CALL = 256 << 10  # bytes of a connection without an accepted call: a handshake needs a few thousand
STRANGERS = 64 << 20  # bytes of all these connections together
UNREAD = 32 << 20  # bytes of a caller with accepted calls: frames of messages that are on their way fit into the window
A_SECOND = 64 << 10  # bytes that pings, headers and acknowledgements of such a caller may have in each second
FRAMING = 1.1  # bytes on the wire for each byte of a message
ACKNOWLEDGED = 0.02  # bytes that acknowledge a byte that was sent
_SENT_AND_RECEIVED = struct.Struct("QQ")
_OFFSET = 120  # of these two in struct tcp_info
Peer = tuple[str, int]


@dataclass(frozen=True)
class Traffic:
    """Bytes of a connection since its beginning, as the kernel counts them."""

    sent: int = 0
    received: int = 0


def traffic_of(connection: socket.socket) -> Traffic:
    """Return the traffic of a TCP connection; zeros if the kernel does not count."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _SENT_AND_RECEIVED.size)
        return Traffic(*_SENT_AND_RECEIVED.unpack_from(info, _OFFSET))
    return Traffic()


@dataclass(frozen=True)
class _Account:
    at: float
    traffic: Traffic
    unread: float
    suspect: bool = False  # had no accepted call, or too many bytes


class UnreadBytes:
    """Account of each connection: the bytes that it has sent and no handler has read."""

    def __init__(self) -> None:
        self._read: Counter[Peer] = Counter()  # bytes of messages since the last look
        self._accounts: dict[Peer, _Account] = {}
        self.wasted = 0.0  # bytes of connections that were closed for them, or ended without an accepted call, ever

    def __repr__(self) -> str:
        return f"UnreadBytes({len(self._accounts)} connections)"

    def note_read(self, peer: Peer, number: int) -> None:
        """Note that a handler has read a message of this connection."""
        self._read[peer] += number

    def look(self, present: Mapping[Peer, Traffic], accepted: Mapping[Peer, str], now: float) -> list[Peer]:
        """Update all accounts, and return the connections to close: of those that share a bound, the largest go first.

        Args:
            present: Traffic of the connections that are open.
            accepted: Fingerprint of the caller of each connection with an accepted call. The others are strangers' connections.
            now: The present time (monotonic, seconds).
        """
        before = self._accounts
        self.wasted += sum(account.unread for peer, account in before.items() if account.suspect and peer not in present)
        accounts = {peer: self._account(peer, traffic, peer in accepted, now) for peer, traffic in present.items()}
        self._accounts = {}
        self._read.clear()
        beyond: list[Peer] = []
        together: Counter[str] = Counter()
        for peer, account in sorted(accounts.items(), key=lambda item: item[1].unread):
            caller = accepted.get(peer, "")
            alone, bound = (UNREAD, UNREAD) if caller else (BEFORE_A_CALL, STRANGERS)
            together[caller] += math.ceil(account.unread)
            if account.unread > alone or together[caller] > bound:
                beyond.append(peer)
            self._accounts[peer] = replace(account, suspect=not caller or peer in beyond[-1:])
        return beyond

    def _account(self, peer: Peer, traffic: Traffic, accepted: bool, now: float) -> _Account:
        last = self._accounts.get(peer) or _Account(now, Traffic(), 0.0)
        more = traffic.received - last.traffic.received
        explained = FRAMING * self._read[peer] + ACKNOWLEDGED * (traffic.sent - last.traffic.sent)
        if accepted:
            explained += A_SECOND * (now - last.at)
        return _Account(now, traffic, max(0.0, last.unread + more - explained))
