"""Results of a federation: its weights and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FORMAT
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
