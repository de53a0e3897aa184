"""`attune.serve`: the server as a function, of which the command `fedserver` is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from attune.common import homes
from attune.common.aio import run_blocking
from attune.common.config import by_section, load_settings, merge

NO_SETTINGS: Mapping[str, Any] = {}


def serve(
    method: str | None = None,
    model: str | None = None,
    rounds: int | str | None = None,
    min_clients: int | None = None,
    clients_per_round: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    config: str | Path | None = None,
    home: str | Path | None = None,
    host: str | None = None,
    port: int | None = None,
    exit_when_done: bool = False,
    join_uses: int = 1,
    dashboard: str | int | None = None,
    ledger: str | None = None,
    blobs: str | None = None,
    allow_code: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serve a federation until SIGINT or SIGTERM, or with `exit_when_done` until the last round.

    Args:
        method: Same as the option of the command `fedserver`, like all arguments here that are not explained.
        model: Same as the option.
        rounds: Same as the option.
        min_clients: Same as the option.
        clients_per_round: Same as the option.
        seed: Same as the option.
        settings: Same as in federation.toml, such as {"method.sigma": 50}: over those of the file `config`, and below the
            other arguments.
        config: A federation.toml.
        home: The home; None: the default home of this user.
        host: The address to listen on; None: where this home was served before, else all addresses.
        port: The port; None: where this home was served before, else 50051; 0: a free one.
        exit_when_done: Whether to end after the last round.
        join_uses: How many devices the printed token admits.
        dashboard: A port, "HOST:PORT" or "off"; None: where it was before, else on this machine alone.
        ledger: URL of a PostgreSQL database, with `blobs`; None: where the state was before, else in the home.
        blobs: s3://BUCKET/PREFIX.
        allow_code: Code of its own that the home may run here, by name; what other arguments name may.
        say: Function that gets each line that the command prints.

    Raises:
        AttuneError: Before or instead of serving.
    """
    from attune.fedserver.process import check_installed

    check_installed()
    from attune.fedserver.app import ServerOptions, run
    from attune.fedserver.home import place_of

    flags = of_flags(
        method=method, model=model, rounds=rounds, min_clients=min_clients, clients_per_round=clients_per_round, seed=seed
    )
    overrides = load_settings(Path(config) if config else None, (), merge(by_section(settings), flags))
    place = Path(home).expanduser() if home is not None else homes.server_home()
    shown = None if dashboard is None else str(dashboard)
    options = ServerOptions(
        place, host, port, exit_when_done, say, shown, join_uses=join_uses,
        storage=place_of(ledger, blobs), allow_code=tuple(allow_code),
    )  # fmt: skip
    run_blocking(run(options, overrides))


def of_flags(**given: Any) -> dict[str, Any]:
    """Return the settings that were given as arguments of `serve`, by section."""
    names = {
        "method": "method.name",
        "model": "model.name",
        "rounds": "round.rounds",
        "min_clients": "round.min_clients",
        "clients_per_round": "round.clients",
        "seed": "seed",
    }
    return by_section({names[argument]: value for argument, value in given.items() if value is not None})
