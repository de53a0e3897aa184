"""Commands of `fedclient` for finished models: `plot` and `watch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FOLDER, FORMAT, PATH
from attune.common.durable import check_folder
from attune.fedclient.cli.shared import ModelPlace, allow_model_option, home_option, model_place, server_option
from attune.fedclient.table_options import read_options, table_options


@click.command()
@click.option("--data", type=PATH, required=True, metavar="SHARD", help="Its test part is used.")
@click.option("--out", type=FOLDER, required=True, help="Folder to write to.")
@click.option(
    "--model", "models", type=PATH, multiple=True, metavar="DIR",
    help="A finished model's folder, or a device's home (repeat to compare; default: this shard's).",
)  # fmt: skip
@click.option(
    "--picture", "pictures", multiple=True,
    type=click.Choice(["rollout", "confusion", "classes", "labels", "predicted", "areas"]),
    help="Only this picture (may be repeated; default: all that the model has).",
)  # fmt: skip
@click.option(
    "--images", type=click.IntRange(1, 20), default=6, show_default=True, help="Test images to show the rollout or areas on."
)
@server_option()
@home_option
@table_options
@FORMAT
@allow_model_option
def plot(
    data: Path,
    out: Path,
    models: tuple[Path, ...],
    pictures: tuple[str, ...],
    images: int,
    server: str | None,
    home: Path | None,
    allow_models: tuple[str, ...],
    formats: tuple[Any, ...],
    **given: Any,
) -> None:
    """Draw pictures of the models' answers on a shard's test part, offline."""
    table = read_options(given)
    if models and (server or home):
        raise click.UsageError("--model names the models: leave --home and --server out")
    check_folder(out)
    device = None if models else ModelPlace(server, home).home_of(data)
    folders, held = (models, ()) if device is None else ((device.model,), device.held_rows())
    from attune.features.finished import model_plots
    from attune.fedclient.data import findings

    with findings.heard() as strange:
        written = model_plots.plot(folders, data, out, images, pictures, allow_models, table, held, formats)
    findings.show({"": strange}, err=True)
    for line in written:
        click.echo(line)


@click.command()
@click.option(
    "--data", type=PATH, required=True, metavar="NEW", help="Labelled new samples, read as a shard is; all of them count."
)
@click.option(
    "--reference", type=PATH, metavar="SHARD", help="Shard whose test part tells the error so far (default: the device's)."
)
@click.option(
    "--tolerance", type=click.FloatRange(0, 0.9), default=0.0, show_default=True,
    help="By how much the error may rise above the bound of the error so far.",
)  # fmt: skip
@model_place
@table_options
@allow_model_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def watch(
    data: Path,
    reference: Path | None,
    tolerance: float,
    place: ModelPlace,
    allow_models: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Say whether the finished model is wrong more often than it was, by new samples; call it daily.

    Each sample counts once, so a file may grow or be given again. Nothing leaves the device.
    """
    table = read_options(given)
    from attune.features.finished.drift import watch_new
    from attune.fedclient.data import findings

    with findings.heard() as strange:
        known = watch_new(place.home_of(None), data, tolerance, reference, table, allow_models)
    findings.show({"": strange}, err=True)
    numbers = {name: getattr(known, name) for name in ("samples", "errors", "limit", "counted", "wrong", "looks", "alarm")}
    click.echo(json.dumps(numbers | {"drift": known.alarm > 0}) if as_json else known.words)
