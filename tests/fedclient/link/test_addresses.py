"""Addresses of servers: as --server takes them, and a device tries each in turn."""

import socket

import pytest

from attune.common.errors import SettingError
from attune.common.exchange.messages import Hello
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import Identity
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.port import Broken


async def test_each_failed_connection_leads_to_the_next_address(authority, device) -> None:
    """Repeat seed 4 of `make chaos-scale`: two steps for one failure led back to the server that was gone."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [int(each.getsockname()[1]) for each in (one, two)]  # nobody listens there after this
    others = (ServerAddress("127.0.0.1", ports[1]),)
    tried = []
    identity = Identity("kiel", device(authority), authority.certificate_pem)
    link = GrpcLink(ServerAddress("127.0.0.1", ports[0], others), identity, print)

    async def handle(event: object) -> None:
        pytest.fail("nobody listens")

    for _ in range(4):
        tried.append(link.address.port)
        with pytest.raises(Broken) as broken:
            await link.control(Hello("test", b"{}"), handle)
        assert broken.value.connecting
        await link.diagnosis()
    await link.close()
    assert tried == [ports[0], ports[1], ports[0], ports[1]]


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
