"""Several addresses of servers: a device tries each in turn."""

from __future__ import annotations

import socket

import pytest

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
