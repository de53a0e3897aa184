"""The command line of the server. Heavy imports wait until a command needs them: --help answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from attune.common import aio, homes
from attune.common.config import load_settings
from attune.common.errors import AttuneError, HomeMismatch, SettingError

if TYPE_CHECKING:
    from attune.fedserver.home import Home
    from attune.fedserver.identity.desk import Desk
    from attune.fedserver.stores.sqlite import SqliteLedger

F = TypeVar("F", bound=Callable[..., Any])
ATTACHED = "attune.fedserver.commands"  # the group of entry points
HOME = click.option("--home", type=click.Path(path_type=Path), default=None, help="The folder of the server's state.")


def SETTINGS(command: F) -> F:  # noqa: N802 - used as the other options are
    """Options that say what a run is."""
    options = (
        click.option("--config", type=click.Path(path_type=Path), help="A federation.toml."),
        click.option("--method", help="fedtp, fedmcsa, fedavg, ... (default fedtp)."),
        click.option("--model", help="vit, transformer, dnn, mlr, or package.module:factory (default: by the kind of data)."),
        click.option("--rounds", type=click.IntRange(1), help="Rounds to train (default 40)."),
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


def main() -> None:
    """The entry point: an AttuneError becomes one line on stderr and its exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except AttuneError as error:
        click.echo(f"fedserver: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"fedserver: {error}", err=True)
        sys.exit(1)


class Group(click.Group):
    """The commands here, and those that installed packages attach by an entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(found.name for found in entry_points(group=ATTACHED))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for found in entry_points(group=ATTACHED, name=cmd_name):
            command: click.Command = found.load()
            return command
        return None


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--port", type=click.IntRange(0, 65535), help="0 picks a free one (default: the home's last port, else 50051).")
@click.option("--host", help="Address to listen on (default: the home's last one, else all).")
@HOME
@SETTINGS
@click.option("--exit-when-done", is_flag=True, help="Stop after the last round instead of serving latecomers.")
@click.option(
    "--join-uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices the printed token admits."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of each line.")
@click.option("-q", "--quiet", is_flag=True, help="Say only what goes wrong.")
@click.option("-v", "--verbose", is_flag=True, help="Say more, for finding faults.")
@click.option(
    "--dashboard", metavar="[HOST:]PORT|off", help="The page's place (default: the last one, else on this machine alone)."
)
@click.option("--lab", default="local", metavar="local|ray|ray://HOST:PORT", show_default=True, help="Who carries out rounds.")
@click.option("--lab-workers", type=click.IntRange(1), help="How many workers of the cluster (default: all).")
@click.version_option(package_name="attune-fl")
@click.pass_context
def cli(
    context: click.Context,
    /,
    port: int | None,
    host: str | None,
    home: Path | None,
    config: Path | None,
    assignments: tuple[str, ...],
    exit_when_done: bool,
    join_uses: int,
    log_format: Literal["text", "json"],
    quiet: bool,
    verbose: bool,
    dashboard: str | None,
    lab: str,
    lab_workers: int | None,
    **flags: Any,
) -> None:
    """Runs the aggregation server. The commands show or change the home of a server."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(None, assignments, {})
    from attune.fedserver import logs, malloc
    from attune.fedserver.serve import serve

    verbosity = int(verbose) - int(quiet)
    logs.begin(log_format, verbosity)
    malloc.prepare()
    serve(
        settings=settings,
        config=config,
        home=home,
        host=host,
        port=port,
        exit_when_done=exit_when_done,
        join_uses=join_uses,
        dashboard=dashboard,
        lab=lab,
        lab_workers=lab_workers or 0,
        say=logs.speaker(log_format, verbosity, click.echo),
        **flags,
    )


@cli.group(invoke_without_command=True)
@HOME
@click.option("--uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices may join with it.")
@click.option("--ttl", default="24h", show_default=True, help="How long it is valid: 30m, 24h, 7d.")
@click.option("--for", "only_for", metavar="NAME", default="", help="For this device alone, whose certificate has expired.")
@click.pass_context
def token(context: click.Context, home: Path | None, uses: int, ttl: str, only_for: str) -> None:
    """Prints a join token for a new device, and nothing else; on a terminal also how many devices it admits."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    place, desk = _desk(home)
    key = place.open_authority().public_key_compressed
    click.echo(aio.run(desk.new_token(key, uses, _seconds(ttl), only_for=only_for)))
    whom = only_for or ("one new device" if uses == 1 else f"{uses} new devices")
    if sys.stderr.isatty():  # a pipe may carry both, and then the token is not alone
        click.echo(f"this token admits {whom}, for {ttl}", err=True)
    _wake(place)


@token.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
@click.pass_obj
def list_tokens(outer: Path | None, home: Path | None, as_json: bool) -> None:
    """The join tokens of this home: which admit how many devices, and who has joined with them."""
    import msgspec

    _, desk = _desk(home or outer)
    found = aio.run(desk.tokens())
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        from attune.fedserver.view.status_text import render_tokens

        click.echo(render_tokens(found))


@token.command("revoke")
@HOME
@click.argument("id")
@click.option("--devices", is_flag=True, help="Revoke all devices that have joined with it too.")
@click.pass_obj
def revoke_token(outer: Path | None, home: Path | None, id: str, devices: bool) -> None:
    """Withdraws the join token ID (`fedserver token list`): it admits nobody any more."""
    place, desk = _desk(home or outer)
    revoked = aio.run(desk.revoke_token(id, devices))
    _wake(place)
    click.echo(f"the token {id} is withdrawn")
    for name in revoked:
        click.echo(f"{name} is revoked")


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Writes a small project to edit into FOLDER: data, model, training, settings; it runs at once."""
    from attune.fedserver.starter.write import write_project

    for path in write_project(folder):
        click.echo(path)
    click.echo(f"now: cd {folder}; python run.py")


@cli.command()
@HOME
@click.argument("name")
def revoke(home: Path | None, name: str) -> None:
    """Refuses the device NAME and its certificates from now on, and ends its stream."""
    place, desk = _desk(home)
    aio.run(desk.revoke(name))
    _wake(place)
    click.echo(f"{name} is revoked")


@cli.command()
@HOME
def pause(home: Path | None) -> None:
    """Opens no further training round until `fedserver resume`; the open one goes on to its end."""
    _pause(home, True)


@cli.command()
@HOME
def resume(home: Path | None) -> None:
    """Lets rounds open again after `fedserver pause`."""
    _pause(home, False)


def _pause(home: Path | None, on: bool) -> None:
    """By the running server; without one, in the database, for its next start."""
    place = _place(home)
    place.require()
    if place.is_served():
        from attune.fedserver.rpc.admin_client import pause as tell

        phase, closed = tell(place, on)
        under_way = f"{phase} goes on to its end" if phase != "waiting" else "no round is open"
        click.echo(f"paused after {closed} rounds; {under_way}" if on else "rounds open again")
        return
    _, desk = _desk(home)
    with place.locked():
        aio.run(desk.pause_record(on))
    click.echo("paused; no server runs" if on else "rounds open again when the server runs")


@cli.command()
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
def status(home: Path | None, as_json: bool) -> None:
    """Round, phase, connected devices, devices whose answer is missing, accuracies."""
    import msgspec

    from attune.fedserver.view.beside import status_of

    place = _place(home)
    found = status_of(place, _troubles(place))
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        from attune.fedserver.view.status_text import render_status

        click.echo(render_status(found))


@cli.command()
@HOME
@click.option("--last", type=click.IntRange(1), help="Show only so many entries, the latest.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they are in the file.")
@click.option("--contains", metavar="DIGEST", help="Fail unless this entry, noted before, is still in the log.")
def audit(home: Path | None, last: int | None, as_json: bool, contains: str | None) -> None:
    """Shows who was let in, refused or shut out and which settings changed; exit code 4 if the log is damaged."""
    from attune.fedserver.stores.audit import entries
    from attune.fedserver.view.audit_text import lines_of

    place = _place(home)
    place.require()
    found = list(entries(place.audit.path))
    for line in lines_of(found[-last:] if last else found, as_json):
        click.echo(line)
    if contains is not None and contains not in (digest for _, digest in found):
        raise HomeMismatch(f"the entry {contains} is not in {place.audit.path}: the log was cut or replaced")
    if not as_json:
        click.echo(f"{len(found)} entries, each follows the one before; the last is {found[-1][1] if found else 'none'}")


@cli.command()
@HOME
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder to write to.")
def backup(home: Path | None, out: Path) -> None:
    """Copies all that a federation needs into a folder, beside a running server too."""
    from attune.fedserver.identity.desk import user
    from attune.fedserver.view.backup import back_up

    place = _place(home)
    place.require()
    for line in back_up(place, out):
        click.echo(line)
    place.audit.write("backup made", f"operator {user()}", folder=str(out))


@cli.command()
@click.option("--home", type=click.Path(path_type=Path), required=True, help="The new folder of the server's state.")
@click.option("--from", "source", type=click.Path(path_type=Path), required=True, help="What `fedserver backup` wrote.")
def restore(home: Path, source: Path) -> None:
    """Makes a home of a backup, after every byte of it was verified; exit code 4 if it is damaged."""
    from attune.fedserver.home import Home
    from attune.fedserver.identity.desk import user
    from attune.fedserver.view.backup import restore_to

    for line in restore_to(source, Home(home)):
        click.echo(line)
    Home(home).audit.write("restored", f"operator {user()}", folder=str(source))


@cli.command()
@HOME
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
def export(home: Path | None, out: Path) -> None:
    """Writes the shared and every client's weights, the server's own state and metrics.csv."""
    from attune.fedserver.view.export import export_home

    for line in export_home(_place(home), out):
        click.echo(line)


@cli.command()
@HOME
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write to.")
@click.option(
    "--picture",
    "pictures",
    multiple=True,
    type=click.Choice(["clients", "accuracy", "attention", "embeddings", "training", "metrics"]),
    help="Only this one (may be repeated; default: all that the method has).",
)
@click.option(
    "--labels", type=click.Path(path_type=Path), help="A CSV file, client,label: groups that embeddings are coloured by."
)
@click.option("--runs", multiple=True, metavar="[X=]DIR", help="Exported folders to compare, instead of a home (repeated).")
@click.option(
    "--x", help="With --runs: the setting on the x axis, such as train.lr, or participation; or its name if X is given."
)
def plot(
    home: Path | None, out: Path, pictures: tuple[str, ...], labels: Path | None, runs: tuple[str, ...], x: str | None
) -> None:
    """Pictures of a federation, or of several: PNG files and a page with the numbers."""
    from attune.fedserver.view import plots

    if runs and (home or pictures or labels):
        raise click.UsageError("--runs compares exported folders: it goes with --x and --out alone")
    lines = plots.plot_runs(runs, x, out) if runs else plots.plot_home(_place(home), out, labels, pictures)
    for line in lines:
        click.echo(line)


@cli.group()
def run() -> None:
    """Several runs, one after the other, over the devices of one home: they need not enrol again."""


@run.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def list_runs(home: Path | None, as_json: bool) -> None:
    """The present run and those before it; `status`, `export`, `plot` and `compare` read each of their folders."""
    import msgspec

    from attune.fedserver.view import runs

    found = list(runs.listed(_place(home)))
    click.echo(msgspec.json.encode(found) if as_json else runs.render(found))


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
    place = _place(home)
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

    closed = runs.stop(_place(home), f"operator {user()}")
    click.echo(f"the run is over after {closed} rounds; start the server once more, so that devices fetch their models")


@cli.command()
@HOME
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Also draw a picture and a page into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def compare(home: Path | None, runs: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Finished runs side by side: homes, exported or saved results, and runs of this home by their names."""
    import msgspec

    from attune.fedserver.view import compare as comparison

    read = comparison.read(runs, _place(home))
    found = comparison.compared(read)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        from attune.fedserver.view.compare_text import render

        click.echo(render(found, read))
    if out is not None:
        from attune.fedserver.view import plot_compare

        for line in plot_compare.write(found, read, out):
            click.echo(line, err=as_json)


@cli.command()
@HOME
@click.argument("runs", nargs=-1, metavar="[NAME=]RUN...")
@click.option("--tensorboard", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="A folder of event files.")
@click.option("--mlflow", metavar="URI", help="A tracking server, or a database: sqlite:///runs.db.")
def publish(home: Path | None, runs: tuple[str, ...], tensorboard: Path | None, mlflow: str | None) -> None:
    """Writes the curves of runs for TensorBoard or MLflow: of this home, or of those named as for `compare`."""
    from attune.fedserver.view import compare as comparison

    if tensorboard is None and mlflow is None:
        raise click.UsageError("Missing option '--tensorboard' or '--mlflow'.")
    place = _place(home)
    from attune.fedserver.view import writers

    for each in comparison.read(runs or (str(place.path),), place):
        if tensorboard is not None:
            click.echo(f"{each.name}: {writers.to_tensorboard(each, tensorboard)}")
        if mlflow is not None:
            click.echo(f"{each.name}: run {writers.to_mlflow(each, mlflow)} in MLflow")


@cli.command()
@HOME
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Of a page that is not served yet (default: a free one)."
)
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
def dashboard(home: Path | None, port: int, folder: Path | None) -> None:
    """Prints the address of the running server's page, or serves one of a home or of FOLDER, an exported or saved result."""
    from attune.fedserver.web import command
    from attune.fedserver.web.serving import Place

    if folder is not None and home is not None:
        raise click.UsageError("FOLDER stands alone: without --home")
    place = _place(home)
    if folder is None and (url := command.running_page(place)) is not None:
        click.echo(url)
        return
    if folder is None:
        place.require()
    command.show(folder or place.path, Place(port=port), click.echo)


@cli.command("tls-name")
@HOME
def tls_name(home: Path | None) -> None:
    """Prints the TLS name of this federation, by which a proxy tells several behind one port apart."""
    from attune.common.identity.credential import server_name

    place = _place(home)
    place.require()
    click.echo(server_name(place.open_authority().certificate_pem))


@cli.command()
@HOME
def verify(home: Path | None) -> None:
    """Holds every file of the home against its digest; a line for each that is damaged, and exit code 4."""
    from attune.fedserver.home import Home
    from attune.fedserver.view.verify import damages

    place = Home(home or homes.server_home())
    place.require()
    found = list(damages(place))
    for line in found:
        click.echo(line)
    if found:
        sys.exit(HomeMismatch.exit_code)
    click.echo(f"{place.path} is whole")


def _place(home: Path | None) -> Home:
    from attune.fedserver.home import Home

    return Home(home or homes.server_home())


def _open(home: Path | None) -> tuple[Home, SqliteLedger]:
    """The home and its ledger. Errors: HomeMismatch if there is none."""
    from attune.fedserver.stores.sqlite import SqliteLedger

    place = _place(home)
    place.require()
    return place, SqliteLedger(place.database)


def _desk(home: Path | None) -> tuple[Home, Desk]:
    """The home, and the operator's desk in it. Errors: HomeMismatch if there is none."""
    from attune.fedserver.identity.desk import Desk, user

    place, ledger = _open(home)
    return place, Desk(ledger, place.audit, f"operator {user()}")


def _wake(place: Home) -> None:
    """Tells the running server, if there is one."""
    if place.is_served():
        from attune.fedserver.rpc.admin_client import wake

        wake(place)


def _troubles(place: Home) -> list[str]:
    """What the running server has to say, if there is one; that it does not answer is worth a line too."""
    if not place.exists() or not place.is_served():
        return []
    from attune.common.errors import Unreachable
    from attune.fedserver.rpc.admin_client import troubles

    try:
        return troubles(place)
    except Unreachable as error:
        return [str(error)]


def _seconds(text: str) -> float:
    """`30m`, `24h`, `7d` or seconds. Errors: SettingError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3650 * 86400:
        raise SettingError(f"--ttl takes a time such as 30m, 24h or 7d, not {text!r}")
    return seconds
