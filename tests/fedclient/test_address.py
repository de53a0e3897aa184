"""Addresses of servers, as --server takes them."""

from __future__ import annotations

import pytest

from attune.common.errors import SettingError
from attune.fedclient.address import ServerAddress


def test_several_addresses_are_tried_in_turn() -> None:
    address = ServerAddress.parse("a.example:1, [::1]:2,c:3")
    assert (address.host, address.port, str(address)) == ("a.example", 1, "a.example:1,[::1]:2,c:3")
    assert [address.target, address.next.target, address.next.next.target] == ["a.example:1", "[::1]:2", "c:3"]
    assert address.next.next.next == address


def test_one_address_is_its_own_next() -> None:
    address = ServerAddress.parse("a:1")
    assert address.next == address


@pytest.mark.parametrize("text", ["a:1,", ",a:1", "a:1,b", "a:1;b:2", "a:1,b:0"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--server takes HOST:PORT"):
        ServerAddress.parse(text)
