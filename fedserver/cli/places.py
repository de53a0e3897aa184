"""The home that a command is about, the operator's desk in it, and the server that may run there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attune.common import homes

if TYPE_CHECKING:
    from attune.fedserver.home import ServerHome
    from attune.fedserver.identity.desk import Desk


def place_of(home: Path | None) -> ServerHome:
    from attune.fedserver.home import ServerHome

    return ServerHome(home or homes.server_home())


def desk_of(home: Path | None) -> tuple[ServerHome, Desk]:
    """The home, and the operator's desk in it. Errors: HomeMismatch if there is none."""
    from attune.fedserver.identity.desk import Desk, user

    place = place_of(home)
    place.require()
    return place, Desk(place.open().ledger, f"operator {user()}")


def wake(place: ServerHome) -> None:
    """Tells the running server, if there is one."""
    if place.is_served():
        from attune.fedserver.rpc import admin_client

        admin_client.wake(place)


def troubles_of(place: ServerHome) -> list[str]:
    """What the running server has to say, if there is one; that it does not answer is worth a line too."""
    if not place.exists() or not place.is_served():
        return []
    from attune.common.errors import Unreachable
    from attune.fedserver.rpc.admin_client import troubles

    try:
        return troubles(place)
    except Unreachable as error:
        return [str(error)]
