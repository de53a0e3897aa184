"""Limits on connections to the server's port: on those without a finished handshake, and on those of one caller.

gRPC's core limits the number of connections and the time of a handshake, and knows no addresses. So the process looks at its
own sockets. A connection that has made a call is known; all others are unfinished. Surplus connections are shut down in the
kernel, and the core then drops them. A thread of its own looks, because huge headers keep the event loop busy for seconds.

A peer that has not acknowledged the core's settings may send 16 MiB of headers in a call. When its connection is closed, the
core hands the call to Python all the same, which takes several times the memory, and calls of devices wait. So after a
flood new connections wait: the kernel drops their first packets for a moment (Linux), and their peers try again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

import msgspec

from attune.fedserver.process import device_connections
from attune.fedserver.rpc.unread_bytes import Peer, Traffic, UnreadBytes, traffic_of

DESCRIPTORS = Path("/dev/fd")
LOOK_S, BUSY_S = 0.1, 0.02  # between looks; and after one that found connections beyond a bound
LOOKING = 0.05  # share of the time for looks, unless a bound is reached: one at 10,000 connections takes a tenth of a second
_connect = ctypes.CDLL(None).connect
FEWEST_AN_ADDRESS = 16  # the smallest bound on the unfinished connections of one address
CONNECTIONS_A_CALLER = 8
ACCEPTED_S = 60.0  # from the end of an accepted call on, its connection has the bounds of a caller for so long
FLOOD, FLOOD_S, PAUSE_S = 64 << 20, 10.0, 5.0  # bytes of closed connections within so long make new ones wait for so long
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # socket options of Linux
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)  # "return 0": a filter that lets no packet through
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_DROP))
SEVERAL, WITHIN_S = 3, 60.0  # connections without a call that end within this time: fewer are a look whether the port is open


class Bounds(msgspec.Struct, frozen=True):
    """Limits on connections.

    Attributes:
        connections: All connections, which the core limits.
        unfinished: Connections without a call.
        an_address: Connections without a call from one address.
    """

    connections: int
    unfinished: int
    an_address: int

    @classmethod
    def of(cls, descriptors: int) -> Bounds:
        connections = device_connections(descriptors)
        return cls(connections, connections // 2, max(FEWEST_AN_ADDRESS, connections // 8))


class Socket(msgspec.Struct, frozen=True):
    """Connection of this process. `since` is when it was first seen (monotonic)."""

    fd: int
    peer: Peer
    since: float


class ConnectionReport(msgspec.Struct, frozen=True):
    """Sockets to shut: those without a finished handshake, and those of callers with too many.

    Attributes:
        too_long: Sockets without a finished handshake that must go.
        too_many: Surplus sockets of callers.
        too_much: Sockets with too many bytes that belong to no message, alone or together.
        unfinished: How many sockets have no finished handshake.
        flooded: Some must go, or are suspected, before their time is over: the next look must be soon.
        paused: New connections must wait.
        stalled: Sockets of `cut`.
    """

    too_long: list[Socket]
    too_many: list[Socket]
    too_much: list[Socket]
    unfinished: int
    flooded: bool
    paused: bool
    stalled: list[Socket]


class ConnectionLimiter:
    """Record of which connections have made a call, and the choice of those that are too many. `shut` ends them.

    A connection must make its first call within `handshake_s`.
    """

    def __init__(self, bounds: Bounds, handshake_s: float) -> None:
        self.bounds, self._handshake_s = bounds, handshake_s
        self._callers: dict[Peer, str] = {}  # fingerprint of the certificate; empty: a join token, which many may share
        self._since: dict[Peer, float] = {}
        self._calls: Counter[Peer] = Counter()  # accepted calls under way; 0: all have ended since the last look
        self._accepted_at: dict[Peer, float] = {}  # when an accepted call was last seen on a connection
        self._stalled: set[Peer] = set()  # must go, whatever they do
        self._suspects: set[Peer] = set()  # had no accepted call at the last look, and too many bytes for that
        self._unread = UnreadBytes()
        self._wasted = [(-math.inf, 0.0)]  # of `UnreadBytes`: a time before the last FLOOD_S, and all times since
        self._paused_until = -math.inf
        self._lock = threading.Lock()  # the event loop notes calls and messages while the thread looks
        self.called = 0  # connections that have made a call, ever
        self.ended = 0  # connections that were seen and are gone, ever
        self._failed = 0  # connections that have ended without a call, ever
        self._failed_at: list[float] = []  # times of the last ones

    def came(self, peer: str, fingerprint: str) -> None:
        """Note a call on this connection under a certificate. An empty fingerprint means a join token, which may only enrol.

        A connection under a token has the time and the bounds of a handshake, and does not count against another connection.
        """
        known = address_of(peer)
        with self._lock:
            self.called += known not in self._callers
            self._callers[known] = fingerprint

    @contextlib.contextmanager
    def accepted(self, peer: str) -> Iterator[None]:
        """Count a call that a device or an operator may make, during the block. A refused call raises no bound on bytes."""
        known = address_of(peer)
        self._add_call(known, 1)
        try:
            yield
        finally:
            self._add_call(known, -1)

    def _add_call(self, peer: Peer, number: int) -> None:
        with self._lock:
            self._calls[peer] += number

    def cut(self, peer: str) -> None:
        """Let the next look end a connection: an answer would wait for a peer that takes nothing."""
        with self._lock:
            self._stalled.add(address_of(peer))

    def note_read(self, peer: Peer, number: int) -> None:
        """Note that a handler has read a message of so many bytes from this connection."""
        with self._lock:
            self._unread.note_read(peer, number)

    def failing(self, begun: int, unfinished: int, now: float) -> bool:
        """Return whether more connections have ended without a call, and several did lately.

        `fedclient doctor` and a load balancer open one only to see whether the port answers. A device with an expired
        certificate opens four.

        Args:
            begun: Handshakes that have begun, ever.
            unfinished: Connections that are open and have made no call.
            now: The time (monotonic).
        """
        more = begun - self.called - unfinished - self._failed
        if more <= 0:
            return False
        self._failed += more
        self._failed_at = [*self._failed_at, *[now] * min(more, SEVERAL)][-SEVERAL:]
        return len(self._failed_at) == SEVERAL and self._failed_at[0] > now - WITHIN_S

    def look(self, port: int, now: float) -> ConnectionReport:
        """Return the connections at this port that must be shut.

        Raises:
            OSError: No descriptor is left to look with.
        """
        present = list(sockets(port))
        with self._lock:
            return self._look(present, now)

    def _look(self, present: list[tuple[int, Peer, Traffic]], now: float) -> ConnectionReport:
        peers = {peer for _, peer, _ in present}
        self.ended += len(self._since.keys() - peers)
        self._since = {peer: self._since.get(peer, now) for peer in peers}
        self._callers = {peer: who for peer, who in self._callers.items() if peer in peers}
        known = [Socket(fd, peer, self._since[peer]) for fd, peer, _ in present]
        seen = self._accepted_at | dict.fromkeys(self._calls, now)
        self._accepted_at = {peer: at for peer, at in seen.items() if peer in peers and at >= now - ACCEPTED_S}
        self._calls = +self._calls
        accepted = {peer: self._callers[peer] for peer in self._accepted_at}
        beyond = set(self._unread.look({peer: traffic for _, peer, traffic in present}, accepted, now))
        # A large first message can be here before its call is: then the next look knows of the call.
        suspects = beyond - accepted.keys()
        too_much = [sock for sock in known if sock.peer in beyond - (suspects - self._suspects)]
        self._suspects = suspects
        too_many = self._too_many([sock for sock in known if self._callers.get(sock.peer)])
        too_long = self._too_long([sock for sock in known if not self._callers.get(sock.peer)], now)
        flooded = bool(beyond) or any(self._has_time(sock, now) for sock in too_long)
        unfinished = sum(sock.peer not in self._callers for sock in known)
        self._stalled &= peers
        stalled = [sock for sock in known if sock.peer in self._stalled]
        return ConnectionReport(too_long, too_many, too_much, unfinished, flooded, self._paused(now), stalled)

    def _paused(self, now: float) -> bool:
        """Return whether new connections must wait, because those that were closed sent too much."""
        total = self._unread.wasted
        while len(self._wasted) > 1 and self._wasted[1][0] <= now - FLOOD_S:
            self._wasted.pop(0)
        if total - self._wasted[0][1] > FLOOD:
            self._paused_until, self._wasted = now + PAUSE_S, []
        self._wasted.append((now, total))
        return now < self._paused_until

    def watch(
        self,
        port: int,
        begun: Callable[[], int],
        over: threading.Event,
        tell: Callable[[ConnectionReport | OSError, int], None],
    ) -> None:
        """Look at the port again and again until `over` is set, and shut what must go.

        Args:
            port: The server's port.
            begun: Returns how many handshakes have begun, ever.
            over: Ends the watch.
            tell: Takes each report, or why there is none, and what `begun` returned before.
        """
        pause_s, paused = LOOK_S, False
        while not over.wait(pause_s):
            handshakes, started = begun(), time.monotonic()
            try:
                report = self.look(port, started)
            except OSError as error:  # no descriptor is left to look with
                tell(error, handshakes)
                continue
            shut((*report.too_much, *report.too_many, *report.too_long, *report.stalled))
            if report.paused != paused:
                paused = report.paused
                let_in(port, not paused)
            pause_s = BUSY_S if report.flooded else max(LOOK_S, (time.monotonic() - started) / LOOKING)
            tell(report, handshakes)

    def _has_time(self, sock: Socket, now: float) -> bool:
        return sock.since >= now - self._handshake_s

    def _too_long(self, strangers: list[Socket], now: float) -> list[Socket]:
        """Return the connections whose time is over, and the oldest ones beyond the bounds.

        The oldest go, because an honest handshake takes a moment.
        """
        gone = {sock for sock in strangers if not self._has_time(sock, now)}
        of_address: dict[str, list[Socket]] = defaultdict(list)
        for sock in sorted(strangers, key=lambda sock: sock.since):
            of_address[sock.peer[0]].append(sock)
        for those in of_address.values():
            gone.update(those[: max(0, len(those) - self.bounds.an_address)])
        left = sorted((sock for sock in strangers if sock not in gone), key=lambda sock: sock.since)
        gone.update(left[: max(0, len(left) - self.bounds.unfinished)])
        return sorted(gone, key=lambda sock: sock.since)

    def _too_many(self, known: list[Socket]) -> list[Socket]:
        """Return the oldest connections of callers with too many. An honest caller uses its newest one."""
        of_caller: dict[str, list[Socket]] = defaultdict(list)
        for sock in sorted(known, key=lambda sock: sock.since):
            of_caller[self._callers[sock.peer]].append(sock)
        return [sock for those in of_caller.values() for sock in those[: max(0, len(those) - CONNECTIONS_A_CALLER)]]


def shut(gone: Iterable[Socket]) -> None:
    """End these connections if they are still the same."""
    for sock in gone:
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(sock.fd)) as same,
        ):  # another socket may have the number by now
            if _address(same.getpeername()) == sock.peer:
                # To connect to no address (AF_UNSPEC) resets the connection and drops what the core has not read (Linux).
                _connect(same.fileno(), bytes(16), 16)
                same.shutdown(socket.SHUT_RDWR)


def let_in(port: int, open_: bool) -> None:
    """Let the kernel accept new connections at this port, or drop their first packets. No-op on other kernels than Linux."""
    for ours in _sockets_at(port) if sys.platform == "linux" else ():
        if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ours.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER if open_ else _ATTACH_FILTER, bytes(4) if open_ else _DROP_ALL)


def sockets(port: int) -> Iterator[tuple[int, Peer, Traffic]]:
    """Yield the connections of this process that were made to its port, each with its descriptor and traffic."""
    for ours in _sockets_at(port):
        with contextlib.suppress(OSError):
            yield ours.fileno(), _address(ours.getpeername()), traffic_of(ours)


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process at its port. They stay the core's: the next step of the iterator lets one go."""
    for name in os.listdir(DESCRIPTORS):  # noqa: PTH208 - names are enough
        with contextlib.suppress(OSError, ValueError):
            # No `os.fstat` first: each call that lets the interpreter's lock go waits for a busy event loop.
            ours = socket.socket(fileno=int(name))
            try:
                if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.getsockname()[1] == port:
                    yield ours
            finally:
                ours.detach()


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Peer:
    return name[0].removeprefix("::ffff:"), name[1]


def address_of(peer: str) -> Peer:
    """Return address and port of a peer.

    gRPC writes it as `ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`. In another form the port is 0.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (host.strip("[]").removeprefix("::ffff:"), int(port)) if port.isdecimal() else (peer, 0)
