"""Holds every file of a device's home against what was written; reads only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from attune.common import homes
from attune.common.errors import AttuneError, NoModel
from attune.common.plan import Plan
from attune.common.text import from_json
from attune.fedclient import shards
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.artifact import read_info
from attune.fedclient.work.state import FolderOrders, damaged_files


def damages(home: DeviceHome) -> Iterator[str]:
    """A line for each thing that is damaged: identity, plan, orders, finished model."""
    try:
        identity = home.identity()
        if identity is not None and not identity.credential.fits():
            yield f"{home.identity_folder} is damaged: restore it from a backup, or enrol again"
    except AttuneError as error:
        yield f"{home.identity_folder} is damaged ({error})"
    if home.plan.exists():
        try:
            from_json(home.plan.read_bytes(), Plan)
        except msgspec.DecodeError as error:
            yield f"{home.plan} is damaged ({error}): delete it, the server sends it again"
    yield from FolderOrders(home.orders).damaged()
    if home.model.exists():
        yield from _model(home)


def _model(home: DeviceHome) -> Iterator[str]:
    try:
        for line in damaged_files(home.model, read_info(home.model).files):
            yield f"{line}: start fedclient again to fetch the model"
    except AttuneError as error:
        yield f"{home.model} is damaged ({error}): start fedclient again to fetch the model"


def meant(home: Path | None, server: str | None, data: Sequence[str]) -> list[DeviceHome]:
    """The homes that are meant: --home (or all in it), else those of the shards, of the server, or of this user.

    Errors: NoModel if there is none; SettingError for an address that is none; ShardError for a pattern without a match.
    """
    if home is not None:
        found = [home, *sorted(home.glob("*/"))]
    else:
        address = ServerAddress.parse(server) if server else None
        under = homes.address_folder(address.host, address.port) if address else "*"
        wanted = {homes.shard_folder(path) for path in shards.expand(data)} if data else None
        everywhere = sorted(homes.devices_home().glob(f"{under}/*"))
        found = [path for path in everywhere if wanted is None or path.name in wanted]
    ready = [DeviceHome(path) for path in found if (path / "device.json").exists()]
    if not ready:
        raise NoModel(f"there is no device's home {f'in {home}' if home else f'under {homes.devices_home()}'}")
    return ready
