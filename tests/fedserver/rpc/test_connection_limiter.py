"""Choice of connections to close: with hand-made sockets and times, and once with real ones."""

import asyncio
import contextlib
import functools
import socket
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attune.common import hardware
from attune.fedserver import process
from attune.fedserver.rpc import connection_limiter, server
from attune.fedserver.rpc.connection_limiter import Bounds, ConnectionLimiter, address_of, let_in, shut, sockets
from attune.fedserver.rpc.unread_bytes import BEFORE_A_CALL, UNREAD, Traffic

PORT = 7


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, int]]:
    """Return the peers that the process holds now, by descriptor."""
    found: dict[int, tuple[str, int]] = {}
    monkeypatch.setattr(connection_limiter, "sockets", lambda port: [(fd, peer, Traffic()) for fd, peer in found.items()])
    return found


def fds(gone: list[connection_limiter.Socket]) -> list[int]:
    return [each.fd for each in gone]


def test_bounds_leave_descriptors_for_what_runs() -> None:
    assert Bounds.of(256) == Bounds(128, 64, 16)
    assert Bounds.of(65536) == Bounds(57152, 28576, 7144)
    assert Bounds.of(10) == Bounds(16, 8, 16)


def test_what_has_made_no_call_in_ten_seconds_goes_and_what_has_stays(present: dict[int, tuple[str, int]]) -> None:
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    present.update({3: ("10.0.0.1", 1000), 4: ("10.0.0.2", 1000)})
    assert keeper.look(PORT, 0.0).unfinished == 2
    keeper.came("ipv4:10.0.0.2:1000", "ada")
    assert fds(keeper.look(PORT, 10.0).too_long) == []
    look = keeper.look(PORT, 10.1)
    assert (fds(look.too_long), look.flooded) == ([3], False)
    present[3] = ("10.0.0.1", 1001)  # another connection under the same descriptor
    assert fds(keeper.look(PORT, 20.0).too_long) == []


def test_of_one_address_and_in_all_the_oldest_beyond_the_bound_go(present: dict[int, tuple[str, int]]) -> None:
    keeper = ConnectionLimiter(Bounds(connections=20, unfinished=6, an_address=4), 10.0)
    for number in range(5):
        present[number] = ("10.0.0.9", number)
        keeper.look(PORT, number * 0.1)
    look = keeper.look(PORT, 1.0)
    assert (fds(look.too_long), look.flooded) == ([0], True)
    del present[0]
    present.update({10: ("10.0.0.1", 1), 11: ("10.0.0.2", 1), 12: ("10.0.0.3", 1)})
    assert fds(keeper.look(PORT, 1.1).too_long) == [1], "seven in all, of which the oldest goes"


def test_one_certificate_holds_its_newest_connections(present: dict[int, tuple[str, int]]) -> None:
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    for number in range(10):
        present[number] = ("10.0.0.9", 100 + number)
        keeper.came(f"ipv4:10.0.0.9:{100 + number}", "mallory")
        keeper.look(PORT, float(number))
    look = keeper.look(PORT, 60.0)
    assert (fds(look.too_long), fds(look.too_many)) == ([], [0, 1])
    assert keeper.called == 10


def test_a_large_first_message_may_be_here_before_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections send as much before a call is known: the one whose call follows stays."""
    ada, eve = ("10.0.0.1", 1000), ("10.0.0.2", 1000)
    traffic = Traffic(0, BEFORE_A_CALL + 100_000)
    monkeypatch.setattr(connection_limiter, "sockets", lambda port: [(3, ada, traffic), (4, eve, traffic)])
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    look = keeper.look(PORT, 1.0)
    assert (fds(look.too_much), look.flooded) == ([], True), "the next look must be soon"
    for number, name in ((1, "ada"), (2, "eve")):
        keeper.came(f"ipv4:10.0.0.{number}:1000", name)
    with keeper.accepted("ipv4:10.0.0.1:1000"):  # eve's call is refused, which raises no bound
        look = keeper.look(PORT, 1.05)
    assert (fds(look.too_much), look.flooded) == ([4], True)


def test_connections_that_wasted_64_mib_in_ten_seconds_make_new_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight connections of a stranger send 9 MiB each and are closed, or go by themselves: 72 MiB."""
    held: dict[int, Traffic] = {}
    monkeypatch.setattr(
        connection_limiter, "sockets", lambda port: [(fd, ("10.0.0.1", fd), traffic) for fd, traffic in held.items()]
    )
    paused = []
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    for second in range(8):
        held[second] = Traffic(0, 9 << 20)
        keeper.look(PORT, float(second))
        held.clear()
        paused.append(keeper.look(PORT, second + 0.5).paused)
    assert paused == [False] * 7 + [True]
    assert [keeper.look(PORT, at).paused for at in (7.6, 12.4, 12.5, 20.0)] == [True, True, False, False]
    for hour in range(20):  # the same bytes, at length
        held[0] = Traffic(0, 9 << 20)
        keeper.look(PORT, 3600.0 * (hour + 1))
        held.clear()
        assert not keeper.look(PORT, 3600.0 * (hour + 1) + 1).paused


def test_an_accepted_call_raises_the_bound_while_it_lasts_and_a_minute_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    received = [0]
    monkeypatch.setattr(connection_limiter, "sockets", lambda port: [(3, ("10.0.0.1", 1000), Traffic(0, received[0]))])
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    keeper.came("ipv4:10.0.0.1:1000", "ada")
    with keeper.accepted("ipv4:10.0.0.1:1000"):
        for at in range(0, 7200, 60):
            received[0] += 1 << 20
            assert fds(keeper.look(PORT, float(at)).too_much) == []
    received[0] += UNREAD
    assert fds(keeper.look(PORT, 7140.1).too_much) == []
    assert fds(keeper.look(PORT, 7199.0).too_much) == []
    assert fds(keeper.look(PORT, 7260.0).too_much) == [], "suspected"
    assert fds(keeper.look(PORT, 7260.1).too_much) == [3]


def test_who_enrols_has_called_and_has_the_time_of_a_handshake(present: dict[int, tuple[str, int]]) -> None:
    """Many devices share a token, so that no number of connections under it is too many."""
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    for number in range(12):
        present[number] = ("10.0.0.9", 100 + number)
        keeper.look(PORT, 0.0)
        keeper.came(f"ipv4:10.0.0.9:{100 + number}", "")
    look = keeper.look(PORT, 1.0)
    assert (look.too_long, look.too_many, look.unfinished, keeper.called) == ([], [], 0, 12)
    assert sorted(fds(keeper.look(PORT, 10.1).too_long)) == list(range(12))


async def test_the_guard_gives_memory_back_once_and_maps_small_blocks_before_the_plan(
    present: dict[int, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    mapped: list[int] = []
    keeper = ConnectionLimiter(Bounds.of(4096), 10.0)
    monkeypatch.setattr(connection_limiter, "LOOK_S", 0.0)
    monkeypatch.setattr(hardware, "return_free_memory", lambda: ended.append(keeper.ended))
    monkeypatch.setattr(process, "map_blocks", mapped.append)

    nobody = SimpleNamespace(tell=print, set=print, clear=print, show=print)
    parts = SimpleNamespace(
        _registrar=SimpleNamespace(tls=SimpleNamespace(handshakes=0)), _connections=keeper, _port=PORT, _refusals=nobody,
        _coordinator=SimpleNamespace(state=SimpleNamespace(troubles=nobody, plan=None)), _mapped=0, _returned=0, _cut=False,
    )  # fmt: skip
    parts._looked = functools.partial(server.GrpcServer._looked, cast(Any, parts))
    guard = asyncio.create_task(server.GrpcServer._guard(cast(Any, parts)))
    for held in (server.MANY_ENDED, 1, 0):  # one fewer than many end, then the last
        present.clear()
        present.update({fd: ("10.0.0.1", fd) for fd in range(held)})
        await asyncio.sleep(0.1)
    parts._coordinator.state.plan = "a plan"
    await asyncio.sleep(0.1)
    guard.cancel()
    assert ended == [server.MANY_ENDED]
    assert mapped == [process.ENROLLING_MAPPING_BYTES, process.OWN_MAPPING_BYTES]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("ipv6:%5B::1%5D:50051", ("::1", 50051)),
        ("ipv6:[::1]:50051", ("::1", 50051)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:7", ("10.0.0.1", 7)),
        ("unix:/tmp/x", ("unix:/tmp/x", 0)),
    ],
)
def test_peers_as_grpc_writes_them(peer: str, address: tuple[str, int]) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_real_sockets_of_the_port_are_found_and_shut_and_no_others(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with listening, socket.create_server((host, 0), family=family) as other:
        port = listening.getsockname()[1]
        mine, theirs = (socket.create_connection(each.getsockname()[:2]) for each in (listening, other))
        ours, apart = listening.accept()[0], other.accept()[0]
        with mine, theirs, ours, apart:
            assert {fd: peer for fd, peer, _ in sockets(port)} == {ours.fileno(): mine.getsockname()[:2]}
            [(fd, _, _)] = sockets(port)
            wrong = connection_limiter.Socket(fd, ("10.0.0.1", 1), 0.0)
            shut([wrong])  # the descriptor has become another's
            mine.sendall(b"never read")
            assert {fd: peer for fd, peer, _ in sockets(port)} == {ours.fileno(): mine.getsockname()[:2]}
            shut([connection_limiter.Socket(fd, mine.getsockname()[:2], 0.0)])
            with contextlib.suppress(ConnectionResetError):
                assert mine.recv(1) == b""
            with contextlib.suppress(ConnectionResetError):
                assert ours.recv(10) == b"" or sys.platform != "linux", "what was not read is dropped"
            theirs.sendall(b"x")
            assert apart.recv(1) == b"x"


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such filters")
def test_new_connections_wait_and_open_ones_go_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address) as mine, listening.accept()[0] as ours:
            let_in(address[1], False)
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.3)
            mine.sendall(b"x")
            assert ours.recv(1) == b"x"
            let_in(address[1], True)
            socket.create_connection(address, timeout=60).close()


def test_several_connections_without_a_call_are_told_and_a_look_at_the_port_is_not() -> None:
    keeper = ConnectionLimiter(Bounds.of(256), 10.0)
    assert not keeper.failing(1, 1, 0.0), "it is open"
    assert not keeper.failing(2, 0, 1.0), "doctor, twice"
    assert not keeper.failing(3, 0, 100.0)
    assert not keeper.failing(4, 0, 101.0)
    assert keeper.failing(5, 0, 102.0)
    assert not keeper.failing(5, 0, 103.0), "no more than was told"
    keeper.came("ipv4:10.0.0.2:1000", "ada")
    assert not keeper.failing(6, 0, 104.0), "it has made a call"
    assert keeper.failing(10, 0, 300.0), "four at once, as of a device with an expired certificate"
