"""Who holds connections to the server's port: bounds on those that have not finished the handshake, and on those of one caller.

gRPC's core accepts connections, shakes hands and gives up after a while; it knows a bound on all, and none by address. So the
process looks at its own sockets from outside: what has made a call by its certificate is known, everything else is
unfinished. What is too much is shut down on the kernel's side, and the core lets go of it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

DESCRIPTORS = Path("/dev/fd")
MOST_DESCRIPTORS = 65536  # the limit is raised to this, if the system allows it
RESERVED = 64  # descriptors for the database, blobs and logs; and an eighth of the limit for transfers
LOOK_S, BUSY_S = 0.5, 0.05  # between looks; and after one that found connections beyond a bound
FEWEST_AN_ADDRESS = 16  # unfinished
CONNECTIONS_A_CALLER = 8
Peer = tuple[str, int]


def raise_limit() -> int:
    """How many descriptors this process may have, after asking for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)


@dataclass(frozen=True)
class Bounds:
    """connections: in all, which the core keeps. unfinished, an_address: without a call, in all and of one address."""

    connections: int
    unfinished: int
    an_address: int

    @classmethod
    def of(cls, descriptors: int) -> Bounds:
        connections = max(16, descriptors - RESERVED - descriptors // 8)
        return cls(connections, connections // 2, max(FEWEST_AN_ADDRESS, connections // 8))


@dataclass(frozen=True)
class Socket:
    """One of this process. since: when it was first seen (monotonic)."""

    fd: int
    peer: Peer
    since: float


@dataclass(frozen=True)
class ConnectionReport:
    """Sockets to be shut: that have not finished the handshake, and of callers that hold too many. unfinished: how many.

    flooded: some are to be shut before their time.
    """

    too_long: list[Socket]
    too_many: list[Socket]
    unfinished: int
    flooded: bool


class ConnectionLimiter:
    """Knows which connections have made a call, and says which are too many. `shut` carries it out.

    handshake_s: how soon a connection must have made its first call.
    """

    def __init__(self, bounds: Bounds, handshake_s: float) -> None:
        self.bounds, self._handshake_s = bounds, handshake_s
        self._callers: dict[Peer, str] = {}  # fingerprint of the certificate; empty: a join token, which many may share
        self._since: dict[Peer, float] = {}
        self.called = 0  # connections that have made a call, ever

    def __repr__(self) -> str:
        return f"ConnectionLimiter({len(self._callers)} known of {len(self._since)})"

    def came(self, peer: str, fingerprint: str) -> None:
        """A call came on this connection, under this certificate; empty: under a join token, which may only enrol.

        What comes with a token has the time and the bounds of a handshake, and no other connection counts against it.
        """
        known = address_of(peer)
        self.called += known not in self._callers
        self._callers[known] = fingerprint

    def look(self, port: int, now: float) -> ConnectionReport:
        """What is there at this port, and what of it is to be shut. Errors: OSError if no descriptor is left to look with."""
        found = list(sockets(port))
        peers = {peer for _, peer in found}
        self._since = {peer: self._since.get(peer, now) for peer in peers}
        self._callers = {peer: who for peer, who in self._callers.items() if peer in peers}
        known = [Socket(fd, peer, self._since[peer]) for fd, peer in found]
        too_many = self._too_many([each for each in known if self._callers.get(each.peer)])
        too_long = self._too_long([each for each in known if not self._callers.get(each.peer)], now)
        flooded = any(self._has_time(each, now) for each in too_long)
        return ConnectionReport(too_long, too_many, sum(each.peer not in self._callers for each in known), flooded)

    def _has_time(self, each: Socket, now: float) -> bool:
        return each.since >= now - self._handshake_s

    def _too_long(self, strangers: list[Socket], now: float) -> list[Socket]:
        """Those that have had their time; and the oldest beyond the bounds, for an honest handshake takes a moment."""
        gone = {each for each in strangers if not self._has_time(each, now)}
        of_address: dict[str, list[Socket]] = defaultdict(list)
        for each in sorted(strangers, key=lambda each: each.since):
            of_address[each.peer[0]].append(each)
        for those in of_address.values():
            gone.update(those[: max(0, len(those) - self.bounds.an_address)])
        left = sorted((each for each in strangers if each not in gone), key=lambda each: each.since)
        gone.update(left[: max(0, len(left) - self.bounds.unfinished)])
        return sorted(gone, key=lambda each: each.since)

    def _too_many(self, known: list[Socket]) -> list[Socket]:
        """The oldest of a caller that holds too many: an honest one has moved on to its newest."""
        of_caller: dict[str, list[Socket]] = defaultdict(list)
        for each in sorted(known, key=lambda each: each.since):
            of_caller[self._callers[each.peer]].append(each)
        return [each for those in of_caller.values() for each in those[: max(0, len(those) - CONNECTIONS_A_CALLER)]]


def shut(gone: Iterable[Socket]) -> Counter[str]:
    """Ends these connections, if they are still those; how many of each address."""
    count: Counter[str] = Counter()
    for each in gone:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as same:  # the number may have another by now
            if _address(same.getpeername()) == each.peer:
                same.shutdown(socket.SHUT_RDWR)
                count[each.peer[0]] += 1
    return count


def sockets(port: int) -> Iterator[tuple[int, Peer]]:
    """The connections of this process that were made to its port, each with its descriptor."""
    for name in os.listdir(DESCRIPTORS):  # noqa: PTH208 - names are enough
        with contextlib.suppress(OSError, ValueError):
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                ours = socket.socket(fileno=fd)
                try:
                    if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.getsockname()[1] == port:
                        yield fd, _address(ours.getpeername())
                finally:
                    ours.detach()


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Peer:
    return name[0].removeprefix("::ffff:"), name[1]


def address_of(peer: str) -> Peer:
    """As gRPC writes it, `ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`; another form has the port 0."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (host.strip("[]").removeprefix("::ffff:"), int(port)) if port.isdecimal() else (peer, 0)
