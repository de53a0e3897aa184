"""Results of a federation: weights, and what was spent of privacy; before it trains: statistics, a schema, what noise costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from attune.common.command_group import FILE, FOLDER, NAME, PATH
from attune.common.durable import check_file
from attune.common.errors import SettingError
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, existing, place_of

if TYPE_CHECKING:
    from attune.fedserver.surveys.fleet_statistics import FleetStatistics


@click.command()
@HOME
@click.option("--out", type=PATH, required=True, help="Folder to write to.")
@ALLOW_CODE
def export(home: Path | None, out: Path, allow_code: tuple[str, ...]) -> None:
    """Write the shared and every client's weights, the server's own state and metrics.csv."""
    from attune.fedserver.view.export import export_home

    for line in export_home(place_of(home), out, allow_code):
        click.echo(line)


@click.command()
@HOME
@click.option("--columns", default="", metavar="A,B", help="Only these columns (default: all).")
@click.option(
    "--patience", type=click.FloatRange(1, 600), default=60.0, show_default=True, help="Seconds to wait for each answer."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
@click.option("--out", type=FOLDER, help="Also write a page with pictures to this folder.")
def statistics(home: Path | None, columns: str, patience: float, as_json: bool, out: Path | None) -> None:
    """Ask the connected devices for statistics of their data: sums over at least 5 devices and 10 rows.

    Devices answer that were started with --disclose statistics. Under secure aggregation the server learns one masked sum, of
    devices with --disclose masked-statistics. With privacy.statistics_epsilon each device adds noise. The server must run.
    """
    import msgspec

    from attune.fedserver.rpc.admin_client import statistics as ask
    from attune.fedserver.view.statistics_page import lines_of, write_page

    place = existing(home)
    if not place.is_served():
        raise SettingError(f"no server runs on {place.path}: start it, and ask when the devices are connected")
    report = ask(place, [name.strip() for name in columns.split(",") if name.strip()], patience)
    click.echo(msgspec.json.encode(report).decode() if as_json else "\n".join(lines_of(report)))
    if out is not None:
        for path in write_page(out, report):
            click.echo(f"wrote {path}", err=as_json)


@click.command()
@HOME
@click.option("--model", type=PATH, help="Folder of a finished model (default: the common model of a run).")
@click.option(
    "--matrix", is_flag=True, help="Evaluate the networks that sites share (`fedclient --share-model`), all at all sites."
)
@click.option("--run", type=NAME, default="", metavar="NAME", help="This run's model, or models (default: of the present one).")
@click.option("--name", type=NAME, default="", help="Name of the evaluation's run (default: evaluation-1, -2, ...).")
@click.option("--min-clients", type=click.IntRange(1), help="Devices with which it begins (default: all that are enrolled).")
@click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any further setting, such as train.score=auroc.")
@click.option("--host", help="As of `fedserver`.")
@click.option("--port", type=click.IntRange(0, 65535), help="As of `fedserver`.")
@click.option("--join-uses", type=click.IntRange(1), default=1, help="As of `fedserver`.")
@click.option("--dashboard", metavar="[HOST:]PORT|off", help="As of `fedserver`.")
@ALLOW_CODE
def evaluate(home: Path | None, assignments: tuple[str, ...], **given: Any) -> None:
    """Evaluate a model at all sites once, without training, by the same tests and rules of privacy; then print the status.

    It is a run of its own: the last run is over, and no server runs. After a kill, the same command goes on with it. Devices go
    on predicting with the models that they had.
    """
    from attune.common.config import load_settings
    from attune.fedserver import logs, process
    from attune.fedserver.evaluate import evaluate as ask
    from attune.fedserver.view.homes import render_status

    logs.begin("text", 0)
    process.prepare_memory()
    status = ask(home=home, settings=load_settings(None, assignments, {}), say=click.echo, **given)
    click.echo(render_status(status))


MOST_BYTES = 64 << 20  # of a file with statistics


@click.command()
@click.argument("proposals", nargs=-1, required=True, type=FILE)
@click.option("--edit", type=FILE, metavar="TOML", help="Sections [data.columns.NAME], which win over the proposals.")
@click.option(
    "--columns", type=click.Choice(["all", "common"]), default="all", show_default=True,
    help="A column that a site lacks is filled there like missing values, or left out for all (common).",
)  # fmt: skip
@click.option(
    "--ranges", type=FILE, metavar="JSON",
    help="Output of `fedserver statistics --json`: ranges of numbers over at least 5 devices, with which units are compared.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=FILE, metavar="FILE",
    help="A .json for `fedclient --schema`, or a .toml for `fedserver --config`.  [default: print the TOML]",
)  # fmt: skip
def schema(
    proposals: Sequence[Path], edit: Path | None, columns: Literal["all", "common"], ranges: Path | None, out: Path | None
) -> None:
    """Merge sites' proposals into one schema. The exit code is 2 if they contradict each other."""
    from attune.common.schema_file import read_columns, read_schema, write_schema
    from attune.common.text import clean
    from attune.fedserver.core.table_schemas import merge_proposals, telling, with_ranges

    if out is not None:
        check_file(out)
    edits = {} if edit is None else read_columns(edit)
    read = {name: read_schema(path) for name, path in zip(_names(proposals), proposals, strict=True)}
    merged = merge_proposals(read, edits, columns == "common")
    for name, texts in telling(merged, read).items():
        for text in texts:
            click.echo(f"warning: {clean(f'{name}: {text}')}", err=True)
    if ranges is not None:
        merged = with_ranges(merged, _statistics(ranges))
    if out is None:
        click.echo(merged.to_toml(), nl=False)
        return
    write_schema(out, merged)
    for name, why in merged.left_out.items():
        click.echo(f"left out: {name} ({why})")
    click.echo(f"{out}: {len(merged.feature_names)} features of {len(merged.used)} columns, {merged.digest[:15]} (digest)")


def _statistics(path: Path) -> FleetStatistics:
    """Read what `fedserver statistics --json` has printed.

    Raises:
        SettingError: The file cannot be read, or holds something else.
    """
    import msgspec

    from attune.common.durable import read_small
    from attune.common.errors import SettingError
    from attune.common.text import from_json
    from attune.fedserver.surveys.fleet_statistics import FleetStatistics

    try:
        return from_json(read_small(path, MOST_BYTES), FleetStatistics)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingError(f"{path} holds no statistics of a fleet: {error}") from None


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its own without the suffix, or the whole path where two are alike."""
    stems = [path.stem for path in paths]
    return [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, paths, strict=True)]


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


COMMANDS = (export, evaluate, privacy, schema, statistics)
