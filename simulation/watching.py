"""Dashboard of a running simulation: the same page as a server's, without buttons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.web import serving
from attune.fedserver.web.serving import PageAddress
from attune.simulation.simulation_state import SimulationState

Dashboard = bool | int | str | None
HERE = "this process"  # shown in place of the address at which devices find a server


def page_address(given: Dashboard) -> PageAddress | None:
    """Return the address of the page, or None if it is not served. True is a free port, for this machine only.

    Raises:
        SettingError: The address is not a port or HOST:PORT.
    """
    if given is None or given is False or given == "off":
        return None
    return PageAddress() if given is True else PageAddress.parse(str(given))


@contextlib.contextmanager
def serve_page(address: PageAddress | None, coordinator: Coordinator, state: SimulationState) -> Iterator[None]:
    """Serve the page during the block, and print its address on stderr.

    Raises:
        PortInUse: The port is in use.
    """
    if address is None:
        yield
        return
    # They import the database, which a simulation without a page does not need.
    from attune.fedserver.web.page_tokens import Keyring, new_token
    from attune.fedserver.web.sources import LedgerSource, RunningServer, listening

    listener, token = serving.bind(address), new_token()
    with listening() as feed:
        source = LedgerSource("simulation", state.storage, RunningServer(coordinator, HERE, feed))
        with serving.serving(listener, address.host, Keyring(token), source):
            click.echo(f"dashboard {serving.url_of(listener, token)}", err=True)
            yield
