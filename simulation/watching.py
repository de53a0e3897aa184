"""The page of a simulation that runs: the same as a server's, without buttons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.web import serving
from attune.fedserver.web.serving import PageAddress
from attune.fedserver.web.sources import LedgerSource, RunningServer, listening
from attune.simulation.worlds import World

Shown = bool | int | str | None
HERE = "this process"  # instead of the address at which devices find a server


def place_of(given: Shown) -> PageAddress | None:
    """True: a free port of this machine alone. Errors: SettingError."""
    if given is None or given is False or given == "off":
        return None
    return PageAddress() if given is True else PageAddress.parse(str(given))


@contextlib.contextmanager
def watched(place: PageAddress | None, coordinator: Coordinator, world: World) -> Iterator[None]:
    """Serves the page during the block, and says on stderr where. Errors: PortInUse."""
    if place is None:
        yield
        return
    listener, token = serving.bind(place), serving.new_token()
    with listening() as feed:
        source = LedgerSource("simulation", world.storage, RunningServer(coordinator, HERE, feed))
        with serving.serving(listener, place.host, token, source):
            click.echo(f"dashboard {serving.url_of(listener, token)}", err=True)
            yield
