"""Commands on the running server (or on its home, if no server runs) and on the runs of a home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.command_group import NAME
from attune.common.config import load_settings
from attune.fedserver.cli.shared import HOME, SETTINGS, admin_of, answer_of, existing, operator, place_of, troubles_of


@click.command()
@HOME
def pause(home: Path | None) -> None:
    """Open no further training round until `fedserver resume`; the open one goes on to its end."""
    _pause(home, True)


@click.command()
@HOME
def resume(home: Path | None) -> None:
    """Let rounds open again after `fedserver pause`."""
    _pause(home, False)


def _pause(home: Path | None, on: bool) -> None:
    """Pause by the running server; without one, in the database, for its next start."""
    place = existing(home)
    if place.is_served():
        from attune.fedserver.rpc.admin_client import pause as tell

        phase, closed = tell(place, on)
        under_way = f"{phase} goes on to its end" if phase != "waiting" else "no round is open"
        click.echo(f"paused after {closed} rounds; {under_way}" if on else "rounds open again")
        return
    _, admin = admin_of(home)
    with place.locked():
        answer_of(admin.pause_record(on))
    click.echo("paused; no server runs" if on else "rounds open again when the server runs")


@click.command()
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
def status(home: Path | None, as_json: bool) -> None:
    """Show round, phase, connected devices, devices whose answer is missing, and accuracies."""
    import msgspec

    from attune.fedserver.view.homes import status_of

    place = place_of(home)
    report = status_of(place, troubles_of(place))
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        from attune.fedserver.view.homes import render_status

        click.echo(render_status(report))


@click.command("tls-name")
@HOME
def tls_name(home: Path | None) -> None:
    """Print the TLS name of this federation, by which a proxy tells several behind one port apart."""
    from attune.common.identity.credential import server_name

    place = existing(home)
    click.echo(server_name(place.open_authority().certificate_pem))


@click.group()
def run() -> None:
    """Manage several runs, one after the other, over the devices of one home: they need not enrol again."""


@run.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def list_runs(home: Path | None, as_json: bool) -> None:
    """List the present run and those before it; `status`, `export`, `plot` and `compare` read each of their folders."""
    import msgspec

    from attune.fedserver.view import homes

    listed_runs = list(homes.listed(place_of(home)))
    click.echo(msgspec.json.encode(listed_runs) if as_json else homes.render(listed_runs))


@run.command("new")
@HOME
@click.argument("name", type=NAME)
@SETTINGS
def new_run(home: Path | None, name: str, config: Path | None, assignments: tuple[str, ...], **flags: Any) -> None:
    """Begin the run NAME, with these settings, at the server's next start. No server may run, and the last run is over."""
    from attune.fedserver import runs
    from attune.fedserver.consent import allow_code
    from attune.fedserver.core import planning
    from attune.fedserver.lab.declared import check_declared
    from attune.fedserver.serve import of_flags

    settings = load_settings(config, assignments, of_flags(**flags))
    for line in check_declared(planning.resolve(settings)):
        click.echo(f"warning: {line}", err=True)
    place = place_of(home)
    kept = runs.begin(place, name, settings, operator())
    allow_code(place, settings)
    if kept:
        click.echo(f"the run before is kept in {kept}")
    click.echo(f"the run {name} begins when the server starts: fedserver --home {place.path}")


@click.command()
@HOME
@click.argument("name", type=NAME)
@SETTINGS
def forget(home: Path | None, name: str, config: Path | None, assignments: tuple[str, ...], **flags: Any) -> None:
    """Revoke the device NAME, and begin a run without it, by the present settings and these: the others compute again."""
    from attune.common.config import merge
    from attune.fedserver import runs
    from attune.fedserver.core import planning
    from attune.fedserver.serve import of_flags

    place, admin = admin_of(home)
    snapshot = place.snapshot()
    settings = merge(snapshot.overrides or {}, load_settings(config, assignments, of_flags(**flags)))
    planning.check_one_sum(snapshot.plan, planning.resolve(settings).transforms)
    with place.locked():  # no server runs
        answer_of(admin.revoke(name))
    kept = runs.begin(place, f"without-{name}", settings, operator())
    click.echo(f"{name} is revoked. When the server starts, the run without-{name} begins, in which nothing of {name} counts")
    if kept:
        click.echo(f"the run before is kept in {kept}, with what {name} handed in: delete that folder when you need it no more")


@run.command("stop")
@HOME
def stop_run(home: Path | None) -> None:
    """End the present run after the rounds that are closed. No server may run; at its next start devices get their models."""
    from attune.fedserver import runs

    closed = runs.stop(place_of(home), operator())
    if closed:
        click.echo(f"the run is over after {closed} rounds; start the server once more, so that devices fetch their models")
    else:
        click.echo("the race of methods is given up; `fedserver run new` begins the next run")
