"""Command `fedserver plot`: it draws pictures of a home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FOLDER, FORMAT
from attune.fedserver.cli.shared import HOME, place_of


@click.command()
@HOME
@click.option("--out", type=FOLDER, required=True, help="Folder to write to.")
@click.option(
    "--picture",
    "pictures",
    multiple=True,
    type=click.Choice(["clients", "accuracy", "attention", "embeddings", "matrix"]),
    help="Only this one (may be repeated; default: all that the method has).",
)
@FORMAT
def plot(
    home: Path | None,
    out: Path,
    pictures: tuple[str, ...],
    formats: tuple[Any, ...],
) -> None:
    """Draw pictures of a federation: files and a page with the numbers."""
    from attune.features.pictures import plots

    for line in plots.plot_home(place_of(home), out, pictures, formats):
        click.echo(line)
