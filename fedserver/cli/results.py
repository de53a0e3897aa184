"""Results of a federation: its weights and pictures, and before it trains, what the connected devices' data look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FORMAT
from attune.common.errors import SettingError
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, place_of


@click.command()
@HOME
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@ALLOW_CODE
def export(home: Path | None, out: Path, allow_code: tuple[str, ...]) -> None:
    """Write the shared and every client's weights, the server's own state and metrics.csv."""
    from attune.fedserver.view.export import export_home

    for line in export_home(place_of(home), out, allow_code):
        click.echo(line)


@click.command()
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
@FORMAT
def plot(
    home: Path | None,
    out: Path,
    pictures: tuple[str, ...],
    labels: Path | None,
    runs: tuple[str, ...],
    x: str | None,
    formats: tuple[Any, ...],
) -> None:
    """Draw pictures of a federation, or of several: files and a page with the numbers."""
    from attune.fedserver.view import plots

    if runs and (home or pictures or labels):
        raise click.UsageError("--runs compares exported folders: it goes with --x, --format and --out alone")
    lines = plots.plot_runs(runs, x, out, formats) if runs else plots.plot_home(place_of(home), out, labels, pictures, formats)
    for line in lines:
        click.echo(line)


@click.command()
@HOME
@click.option("--columns", default="", metavar="A,B", help="Only these columns (default: all).")
@click.option(
    "--patience",
    type=click.FloatRange(1, 600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for each answer.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for machines.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Also write a page with pictures to this folder.")
def statistics(home: Path | None, columns: str, patience: float, as_json: bool, out: Path | None) -> None:
    """Ask the connected devices for statistics of their data: sums over at least 5 devices and 10 rows.

    Devices answer that were started with --disclose statistics. Under secure aggregation the server learns one masked sum, of
    devices with --disclose masked-statistics. With privacy.statistics_epsilon each device adds noise. The server must run.
    """
    import msgspec

    from attune.fedserver.rpc.admin_client import statistics as ask
    from attune.fedserver.view.statistics_page import lines_of, write_page

    place = place_of(home)
    place.require()
    if not place.is_served():
        raise SettingError(f"no server runs on {place.path}: start it, and ask when the devices are connected")
    report = ask(place, [name.strip() for name in columns.split(",") if name.strip()], patience)
    click.echo(msgspec.json.encode(report).decode() if as_json else "\n".join(lines_of(report)))
    if out is not None:
        for path in write_page(out, report):
            click.echo(f"wrote {path}", err=as_json)
