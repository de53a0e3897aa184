"""Options of several commands, and what they name: the home, the operator's decisions, and the running server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attune.common import homes
from attune.common.command_group import PATH, RoundsType

if TYPE_CHECKING:
    from attune.fedserver.home import ServerHome
    from attune.fedserver.identity.admin import FederationAdmin


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
HOME = click.option("--home", type=PATH, default=None, help="The folder of the server's state.")

ALLOW_CODE = click.option(
    "--allow-code", multiple=True, metavar="NAME", help="Code that the home may bring: package.module:factory, or a package."
)


def SETTINGS(command: F) -> F:  # noqa: N802 - used as the other options are
    """Add the options that say what a run is."""
    options = (
        click.option("--config", type=PATH, help="A federation.toml."),
        click.option("--method", help="fedtp, fedmcsa, fedavg, ... (default fedtp)."),
        click.option("--model", help="vit, transformer, dnn, mlr, or package.module:factory (default: by the kind of data)."),
        click.option("--rounds", type=RoundsType(1), help="Rounds to train, or auto (default 40)."),
        click.option("--min-clients", type=click.IntRange(1), help="Devices needed before a round starts (default 2)."),
        click.option(
            "--clients-per-round", type=click.IntRange(1), help="Devices sampled for a round (default: all connected)."
        ),
        click.option("--seed", type=int, help="Seed of every random draw (default 0)."),
        click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any setting, such as method.sigma=50."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def place_of(home: Path | None) -> ServerHome:
    """Return the home that an option names, or the default one."""
    from attune.fedserver.home import ServerHome

    return ServerHome(home or homes.server_home())


def existing(home: Path | None) -> ServerHome:
    """Return the home that an option names, or the default one.

    Raises:
        HomeMismatch: There is no federation.
    """
    place = place_of(home)
    place.require()
    return place


def operator() -> str:
    """Return who acts, for the audit log."""
    from attune.fedserver.identity.admin import user

    return f"operator {user()}"


def admin_of(home: Path | None) -> tuple[ServerHome, FederationAdmin]:
    """Return the home, and the operator's decisions in it.

    Raises:
        HomeMismatch: There is no federation.
    """
    from attune.fedserver.identity.admin import FederationAdmin

    place = existing(home)
    return place, FederationAdmin(place.open().ledger, operator())


def wake(place: ServerHome) -> None:
    """Tell the running server, if there is one, that the ledger has changed. One on another machine finds out by itself."""
    if place.is_served():
        from attune.common.errors import Unreachable
        from attune.fedserver.rpc import admin_client

        try:
            admin_client.wake(place)
        except Unreachable:
            if place.storage_place() is None:
                raise


def troubles_of(place: ServerHome) -> list[str]:
    """Return the troubles of the running server, if there is one, or a line that says that it does not answer."""
    if not place.exists() or not place.is_served() or place.standby():
        return []
    from attune.common.errors import Unreachable
    from attune.fedserver.rpc.admin_client import troubles

    try:
        return troubles(place)
    except Unreachable as error:
        return [str(error)]


def answer_of(work: Coroutine[Any, Any, T]) -> T:
    """Run asynchronous work of a command to its end, and return its result."""
    from attune.common import aio

    return aio.run(work)
