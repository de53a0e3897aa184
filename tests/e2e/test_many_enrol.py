"""A fleet enrols at once: its devices share one token, and each of them is accepted."""

import asyncio
from pathlib import Path

from attune.common import aio
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import DeviceHome, DeviceInfo
from attune.fedclient.link.enrol import enrol
from tests.e2e.harness import FederationAt

DEVICES = 100  # more than one caller may have calls and connections


def test_devices_that_share_a_token_enrol_at_once(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("many")
    server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9", "--join-uses", str(DEVICES))
    address, token = ServerAddress("127.0.0.1", server.port), server.join_token

    async def all_of_them() -> list[str]:
        homes = [(DeviceHome(tmp_path / f"d{number}"), f"d{number:03}") for number in range(DEVICES)]
        records = [(home, DeviceInfo(name, str(address), str(tmp_path))) for home, name in homes]
        found = await asyncio.gather(*(enrol(home, info, address, token, 60.0, print) for home, info in records))
        return [identity.name for identity in found]

    assert aio.run(all_of_them()) == [f"d{number:03}" for number in range(DEVICES)]
    status = federation.status()
    assert len(status["clients"]) == DEVICES
    assert status["refused"] == []
