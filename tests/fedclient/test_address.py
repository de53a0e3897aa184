"""Addresses of servers, as --server takes them."""

from __future__ import annotations

import pytest

from attune.common.errors import SettingError
from attune.fedclient.address import ServerAddress

ONE_THAT_IS_NONE = ("host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:5", "[::1]")


def test_several_addresses_are_tried_in_turn() -> None:
    address = ServerAddress.parse("a.example:1, [::1]:2,c:3")
    assert (address.host, address.port, str(address)) == ("a.example", 1, "a.example:1,[::1]:2,c:3")
    assert [address.target, address.next.target, address.next.next.target] == ["a.example:1", "[::1]:2", "c:3"]
    assert address.next.next.next == address


def test_one_address_is_its_own_next() -> None:
    address = ServerAddress.parse("a:1")
    assert address.next == address


@pytest.mark.parametrize("text", ["a:1,", ",a:1", "a:1,b", "a:1;b:2", "a:1,b:0", *ONE_THAT_IS_NONE])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--server takes HOST:PORT"):
        ServerAddress.parse(text)


def test_one_address_has_brackets_around_ipv6_and_is_this_machine_or_another() -> None:
    assert ServerAddress.parse("[::1]:5") == ServerAddress("::1", 5)
    assert str(ServerAddress("::1", 5)) == "[::1]:5"
    given = ("localhost:1", "127.0.0.9:1", "[::1]:1", "10.0.0.1:1", "h:1")
    assert [ServerAddress.parse(text).is_this_machine for text in given] == [True, True, True, False, False]
