"""Accounts of bytes that belong to no message: worked out by hand, and once with the kernel's own count."""

import socket
import sys

import pytest

from attune.fedserver.rpc.unread_bytes import A_SECOND, BEFORE_A_CALL, STRANGERS, UNREAD, Traffic, UnreadBytes, traffic_of

ADA, EVE = ("10.0.0.1", 1), ("10.0.0.2", 2)
ACCEPTED = {ADA: "ada"}


def test_a_connection_without_an_accepted_call_has_a_small_fixed_bound() -> None:
    unread = UnreadBytes()
    assert unread.look({EVE: Traffic(0, BEFORE_A_CALL)}, ACCEPTED, 0.0) == []
    assert unread.look({EVE: Traffic(0, BEFORE_A_CALL + 1)}, ACCEPTED, 3600.0) == [EVE]


def test_connections_without_an_accepted_call_share_a_bound_and_the_largest_go() -> None:
    """300 connections have sent 240 KiB each: 70.3 MiB. With the 100 small ones, 272 of them are 64 MiB together."""
    small = {("10.0.0.1", port): Traffic(0, 2500) for port in range(100)}
    large = {("10.0.0.1", 1000 + port): Traffic(0, 240 << 10) for port in range(300)}
    gone = UnreadBytes().look(small | large, {}, 0.0)
    assert len(gone) == 300 - (STRANGERS - 100 * 2500) // (240 << 10) == 28
    assert large.keys() >= set(gone)


def test_a_callers_connections_share_its_bound_and_callers_behind_one_address_do_not() -> None:
    """200 devices behind a proxy have 31 MiB on their way, one of them on three connections."""
    uploads = {("10.0.0.1", port): Traffic(0, UNREAD - (1 << 20)) for port in range(199)}
    accepted = {peer: f"device {number}" for number, peer in enumerate(uploads)}
    three = {("10.0.0.1", 900 + number): Traffic(0, (10 + number) << 20) for number in range(3)}
    accepted |= dict.fromkeys(three, "eve")
    assert UnreadBytes().look(uploads | three, accepted, 0.0) == [("10.0.0.1", 902)], "10 + 11 + 12 MiB are above 32"


def test_bytes_of_messages_are_no_unread_bytes() -> None:
    """Upload 10 GB in steps of 100 MB, with a tenth of framing, and never more than a window that is not read yet."""
    unread, step = UnreadBytes(), 100_000_000
    for number in range(1, 101):
        unread.note_read(ADA, step)
        assert unread.look({ADA: Traffic(0, round(1.1 * number * step) + UNREAD)}, ACCEPTED, 0.0) == []


def test_acknowledgements_of_a_long_download_are_no_unread_bytes() -> None:
    unread = UnreadBytes()
    for number in range(1, 101):
        assert unread.look({ADA: Traffic(number * 1_000_000_000, number * 20_000_000)}, ACCEPTED, 0.0) == []


def test_headers_without_end_are_noticed_beside_messages() -> None:
    unread, steps = UnreadBytes(), 0
    while unread.look({ADA: Traffic(0, steps * 2_000_000)}, ACCEPTED, steps * 0.5) == []:
        steps += 1
        unread.note_read(ADA, 1_000_000)
    excess = 2_000_000 - 1_100_000 - A_SECOND * 0.5
    assert steps == UNREAD // excess + 1


def test_pings_of_months_are_no_unread_bytes() -> None:
    unread = UnreadBytes()
    for day in range(100):
        assert unread.look({ADA: Traffic(0, day * 50_000_000)}, ACCEPTED, day * 86400.0) == []


def test_a_closed_connection_leaves_no_account() -> None:
    unread = UnreadBytes()
    unread.look({EVE: Traffic(0, 9 * UNREAD)}, ACCEPTED, 0.0)
    assert unread.look({}, ACCEPTED, 0.0) == []
    assert repr(unread) == "UnreadBytes(0 connections)"


def test_only_bytes_of_strangers_and_of_callers_beyond_their_bound_are_wasted() -> None:
    unread = UnreadBytes()
    unread.look({ADA: Traffic(0, UNREAD), EVE: Traffic(0, 5000)}, ACCEPTED, 0.0)
    unread.look({}, ACCEPTED, 0.0)
    assert unread.wasted == 5000
    unread.look({ADA: Traffic(0, UNREAD + 1)}, ACCEPTED, 0.0)
    unread.look({}, ACCEPTED, 0.0)
    unread.look({}, ACCEPTED, 0.0)
    assert unread.wasted == 5000 + UNREAD + 1


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not count")
def test_the_kernel_counts_what_was_received_and_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        ours, _ = listener.accept()
        with ours:
            mine.sendall(b"x" * 5000)
            assert len(ours.recv(5000, socket.MSG_WAITALL)) == 5000
            ours.sendall(b"y" * 300)
            assert len(mine.recv(300, socket.MSG_WAITALL)) == 300
            assert traffic_of(ours).received == 5000
            assert traffic_of(mine).received == 300
