"""`attune.serve`: the server as a function, of which the command `fedserver` is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attune.common import homes
from attune.common.aio import run_anywhere
from attune.common.config import by_section, load_settings, merge

NO_SETTINGS: Mapping[str, Any] = {}


def serve(
    method: str | None = None,
    model: str | None = None,
    rounds: int | None = None,
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
    lab: str = "local",
    lab_workers: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Serves a federation until SIGINT or SIGTERM, or with `exit_when_done` until the last round. Arguments as `fedserver`'s.

    settings: as in federation.toml, such as {"method.sigma": 50}; over those of the file `config`, and below the other
    arguments. home: None is the default home of this user. host and port: where this home was served before, else all
    addresses and 50051; port 0 is a free one. join_uses: how many devices the printed token admits. dashboard: a port,
    "HOST:PORT" or "off"; by default where it was before, else on this machine alone. lab: where rounds are carried out:
    "local", "ray" (a Ray cluster of this machine) or "ray://HOST:PORT"; lab_workers: by how many workers, 0: all that the
    cluster has. say: hears what the command prints.
    Errors: AttuneError, each before or instead of serving.
    """
    from attune.fedserver.web.serving import check_installed

    check_installed()
    from attune.fedserver.app import ServerOptions, run
    from attune.fedserver.lab.cluster.location import LabLocation

    flags = of_flags(
        method=method, model=model, rounds=rounds, min_clients=min_clients, clients_per_round=clients_per_round, seed=seed
    )
    overrides = load_settings(Path(config) if config else None, (), merge(by_section(settings), flags))
    place = Path(home).expanduser() if home is not None else homes.server_home()
    shown = None if dashboard is None else str(dashboard)
    location = LabLocation(lab, lab_workers)
    options = ServerOptions(place, host, port, exit_when_done, say, shown, join_uses=join_uses, location=location)
    run_anywhere(run(options, overrides))


def of_flags(
    method: str | None, model: str | None, rounds: int | None, min_clients: int | None, clients_per_round: int | None,
    seed: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Settings by section, of what was given."""
    flags: dict[str, Any] = {
        "method.name": method,
        "model.name": model,
        "round.rounds": rounds,
        "round.min_clients": min_clients,
        "round.clients": clients_per_round,
        "seed": seed,
    }
    return by_section({name: value for name, value in flags.items() if value is not None})
