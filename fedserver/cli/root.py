"""The command itself: it starts the server, and has the other commands. `privacy`: what was spent, what a guarantee costs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from attune import seams
from attune.common import homes
from attune.common.command_group import PATH, ExtensibleGroup
from attune.common.config import load_settings
from attune.common.errors import AttuneError, SettingError, needing
from attune.fedserver.cli import results, running, tokens
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, SETTINGS, place_of

PROJECT = Path(__file__).parents[1] / "starter" / "project"  # the files that `new` writes


@click.group(invoke_without_command=True)
@HOME
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def privacy(context: click.Context, /, home: Path | None, as_json: bool) -> None:
    """Show what was spent of the privacy budget, by devices or by the server; with `plan`, compute what a guarantee costs."""
    if context.invoked_subcommand is not None:
        return
    from attune.fedserver.view.homes import privacy_of

    report = privacy_of(place_of(home))
    if as_json:
        click.echo(json.dumps(report))
        return
    for line in [*_present_lines(report), *_earlier_lines(report["earlier"])]:
        click.echo(line)


def _present_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield what was spent in the present run, and by its devices."""
    from attune.fedserver.view.status import fallen_line, guarantee_lines

    unit, epsilon = report["unit"], report["epsilon"]
    if not report["mode"]:
        yield "devices train without noise (privacy.unit), and without secure aggregation"
        return
    yield f"{report['mode']}: {report['visible']}"
    if report["clipping"] is not None:
        yield report["clipping"]["told"]
    if report["released"] is not None:
        yield from [*guarantee_lines(report["released"]), report["released"]["adjacency"]]
    if unit not in ("example", "group"):
        return
    budget = "no budget" if epsilon is None else f"budget epsilon = {epsilon:g}"
    yield f"noise on the devices, for each {unit}: {budget} at delta = {report['delta']:g}, {report['orders']} orders at most"
    for device, spent in report["spent"].items():
        planned = report["planned"].get(device)
        words = "nothing reported" if spent is None else f"spent epsilon = {spent:.3g}"
        yield f"{device}  {words}" + ("" if planned is None else f", planned {planned:.3g}")
    if report["fallen"]:
        yield fallen_line(report["fallen"])


def _earlier_lines(earlier: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what was spent in earlier runs."""
    from attune.fedserver.view.status import guarantee_lines

    for run in earlier:
        if run["released"] is not None:
            yield f"earlier run {run['run']}: {guarantee_lines(run['released'])[0]}"
        for device, spent in run["spent"].items():
            yield f"{device}  after the earlier run {run['run']} spent epsilon = {spent:.3g}"


@privacy.command()
@click.option("--unit", type=click.Choice(["client", "example", "group"]), required=True, help="Whom the guarantee protects.")
@click.option("--devices", type=click.IntRange(1), help="client: devices of the federation.")
@click.option("--per-round", type=click.IntRange(1), help="client: devices that a round draws, on average.")
@click.option("--rounds", type=click.IntRange(1), help="client: rounds.")
@click.option("--samples", type=click.IntRange(1), help="example: training samples of the device. group: its groups.")
@click.option("--batch", type=click.IntRange(1), help="example: samples of a step, on average. group: groups of a step.")
@click.option("--epochs", type=click.IntRange(1), help="example, group: passes over the samples in all orders together.")
@click.option("--noise", type=click.FloatRange(0), help="Noise multiplier; prints epsilon.")
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), help="Prints the noise multiplier that it needs.")
@click.option(
    "--delta",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Chance that the guarantee fails (default: half of one divided by the devices or samples).",
)
@click.option(
    "--adjacency",
    type=click.Choice(["zero-out", "replace-one"]),
    default="zero-out",
    show_default=True,
    help="Which data sets the guarantee compares.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    unit: str, noise: float | None, epsilon: float | None, delta: float | None, adjacency: str, as_json: bool,
    **counts: int | None,
) -> None:  # fmt: skip
    """Compute epsilon from the noise, or the noise from epsilon."""
    from attune.common.privacy.accountant import MEANING, Adjacency, NoisySteps, epsilon_of, noise_for

    if (noise is None) == (epsilon is None):
        raise click.UsageError("say --noise or --epsilon, and the other one is computed")
    names = ("devices", "per_round", "rounds") if unit == "client" else ("samples", "batch", "epochs")
    count, drawn, repeats = _all_of({f"--{name.replace('_', '-')}": counts[name] for name in names}, unit)
    steps = repeats if unit == "client" else repeats * math.ceil(count / drawn)
    rate, delta = min(1.0, drawn / count), delta or 1 / (2 * count)
    chosen: Adjacency = "replace-one" if adjacency == "replace-one" else "zero-out"
    if epsilon is None and noise is not None:
        answer = {"epsilon": epsilon_of([NoisySteps(rate, noise, steps)], delta, chosen), "noise": noise}
    else:
        answer = {"noise": noise_for(epsilon or 0.0, delta, rate, steps, adjacency=chosen), "epsilon": epsilon or 0.0}
    meaning = MEANING[chosen].format(unit={"client": "device", "example": "sample"}.get(unit, unit))
    sampling = (
        f"each is drawn independently with probability {rate:.3g}" if rate < 1 else "all are in each step: no amplification"
    )
    if as_json:
        finite = {key: value if math.isfinite(value) else None for key, value in answer.items()}
        words = {"adjacency": adjacency, "meaning": meaning, "sampling": sampling}
        click.echo(json.dumps({**finite, "delta": delta, "rate": rate, "steps": steps, **words}))
        return
    click.echo(", ".join(f"{key} = {value:.4g}" for key, value in answer.items()) + f" at delta = {delta:.3g}")
    click.echo(f"{adjacency}: {meaning}; {steps:,} steps, {sampling}")


def _all_of(values: dict[str, int | None], unit: str) -> list[int]:
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise click.UsageError(f"--unit {unit} needs {', '.join(missing)}")
    return [value for value in values.values() if value is not None]


COMMANDS = (
    tokens.token, tokens.revoke,
    running.pause, running.resume, running.status, running.tls_name,
    tokens.audit, tokens.backup, tokens.restore, tokens.verify,
    results.export, results.evaluate,
    privacy, results.schema, results.statistics,
    running.run, running.forget,
)  # fmt: skip


def main() -> None:
    """Run the command; an AttuneError becomes one line on stderr and its exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (AttuneError, ModuleNotFoundError) as error:
        click.echo(f"fedserver: {needing(error)}", err=True)
        sys.exit(needing(error).exit_code)
    except OSError as error:
        click.echo(f"fedserver: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(1)
    except RuntimeError as error:
        if not homes.is_homeless(error):
            raise
        click.echo(f"fedserver: {homes.HOMELESS}", err=True)
        sys.exit(SettingError.exit_code)


class ServerCommands(ExtensibleGroup):
    """The commands of `fedserver`."""

    entry_point_group = "attune.fedserver.commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(name for feature in seams.features() for name in feature.commands)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = seams.answer("commands", cmd_name) or super().get_command(ctx, cmd_name)
        if command is None and cmd_name in seams.COMMANDS:
            raise seams.absent(seams.COMMANDS[cmd_name], f"fedserver {cmd_name}")
        return command


@click.group(
    cls=ServerCommands, commands=COMMANDS, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--port", type=click.IntRange(0, 65535), help="0 picks a free one (default: the home's last port, else 50051).")
@click.option("--host", help="Address to listen on (default: the home's last one, else all).")
@HOME
@SETTINGS
@click.option("--exit-when-done", is_flag=True, help="Stop after the last round instead of serving latecomers.")
@click.option(
    "--join-uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices the printed token admits."
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of the log's lines."
)
@click.option("-q", "--quiet", is_flag=True, help="Say only what goes wrong.")
@click.option("-v", "--verbose", is_flag=True, help="Say more, for finding faults.")
@click.option(
    "--dashboard", metavar="[HOST:]PORT|off", help="The page's place (default: the last one, else on this machine alone)."
)
@click.option(
    "--ledger",
    metavar="postgresql://...",
    help="A database for the ledger, with --blobs (default: the last one, else the home).",
)
@click.option("--blobs", metavar="s3://BUCKET/PREFIX", help="A place for tensors and updates, with --ledger.")
@ALLOW_CODE
@click.version_option(package_name="attune-fl")
@click.pass_context
def cli(
    context: click.Context,
    /,
    assignments: tuple[str, ...],
    log_format: Literal["text", "json"],
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Run the aggregation server. The commands show or change the home of a server."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(None, assignments, {})
    from attune.fedserver import logs, process
    from attune.fedserver.serve import serve

    verbosity = int(verbose) - int(quiet)
    logs.begin(log_format, verbosity)
    process.prepare_memory()
    say = logs.speaker(log_format, verbosity, click.echo)
    serve(settings=settings, say=say, **given)


@cli.command()
@click.argument("folder", type=PATH)
def new(folder: Path) -> None:
    """Write a small project to edit into FOLDER: data, model, training, settings; it runs at once."""
    for path in write_project(folder):
        click.echo(path)
    click.echo(f"now: cd {folder}; python run.py")


def write_project(folder: Path) -> list[Path]:
    """Write the files of a new project, and return their paths in the order in which to read them.

    Raises:
        SettingError: The folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already and is not empty; nothing was written: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in ("README.md", "run.py", "data.py", "model.py", "federation.toml"):
        written.append(folder / name)
        written[-1].write_bytes((PROJECT / name).read_bytes())
    return written
