"""Several runs over one enrolled fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.config import load_settings
from attune.fedserver.cli.options import HOME, SETTINGS
from attune.fedserver.cli.places import place_of


@click.group()
def run() -> None:
    """Several runs, one after the other, over the devices of one home: they need not enrol again."""


@run.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def list_runs(home: Path | None, as_json: bool) -> None:
    """The present run and those before it; `status`, `export`, `plot` and `compare` read each of their folders."""
    import msgspec

    from attune.fedserver.view import homes

    found = list(homes.listed(place_of(home)))
    click.echo(msgspec.json.encode(found) if as_json else homes.render(found))


@run.command("new")
@HOME
@click.argument("name")
@SETTINGS
def new_run(home: Path | None, name: str, config: Path | None, assignments: tuple[str, ...], **flags: Any) -> None:
    """Begins the run NAME, with these settings, at the server's next start. No server may run, and the last run is over."""
    from attune.fedserver import runs
    from attune.fedserver.core import planning
    from attune.fedserver.identity.desk import user
    from attune.fedserver.lab.declared import check_declared
    from attune.fedserver.serve import of_flags

    settings = load_settings(config, assignments, of_flags(**flags))
    check_declared(planning.resolve(settings))
    place = place_of(home)
    kept = runs.begin(place, name, settings, f"operator {user()}")
    if kept:
        click.echo(f"the run before is kept in {kept}")
    click.echo(f"the run {name} begins when the server starts: fedserver --home {place.path}")


@run.command("stop")
@HOME
def stop_run(home: Path | None) -> None:
    """Ends the present run after the rounds that are closed. No server may run; at its next start devices get their models."""
    from attune.fedserver import runs
    from attune.fedserver.identity.desk import user

    closed = runs.stop(place_of(home), f"operator {user()}")
    click.echo(f"the run is over after {closed} rounds; start the server once more, so that devices fetch their models")
