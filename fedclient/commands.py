"""Commands beside training, loaded when they are named: the finished model for other programs, and what a device lacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from attune.fedclient.command_options import (
    data_option,
    home_of,
    home_option,
    reported,
    server_option,
    token_file_option,
    token_in,
)
from attune.fedclient.table_options import read_options, table_options


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A file .onnx or .pt2 (torch.export)."
)
@click.option("--data", type=click.Path(path_type=Path), metavar="SHARD", help="Check it on this shard's test part.")
@server_option()
@home_option
def export(out: Path, data: Path | None, server: str | None, home: Path | None) -> None:
    """The finished model as a file for other programs; it is run once and compared with the original."""
    with reported():
        folder = home_of(home, server, data).model
        from attune.fedclient.data.shard import load_shard
        from attune.fedclient.model.artifact import Model
        from attune.fedclient.model.portable import export as write

        samples = load_shard(data).test_x if data is not None else None
        difference = write(Model.load(folder), out, samples)
        click.echo(f"{out}: probabilities differ from the original's by {difference:.1g} at most")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 picks a free one.")
@token_file_option
@server_option()
@home_option
def serve(host: str, port: int, token_file: str | None, server: str | None, home: Path | None) -> None:
    """Predictions of the finished model over HTTP, offline: POST /predict, GET /model, GET /healthz."""
    with reported():
        folder = home_of(home, server, None).model
        from attune.fedclient.model.artifact import Model
        from attune.fedclient.model.serve import Place
        from attune.fedclient.model.serve import serve as run

        place = Place(host, port, token_in(None, token_file) or "")
        place.check()
        run(Model.load(folder), place, click.echo)


@click.command()
@data_option("The shard that this device would train on.")
@server_option()
@table_options
@home_option
def doctor(data: tuple[str, ...], server: str | None, home: Path | None, **given: Any) -> None:
    """Looks whether this device can take part: machine, data, home, server; exit code 1 if something is in the way."""
    with reported():
        from attune.fedclient.doctor import examine

        found = list(examine(Path(data[0]) if data else None, server, home, read_options(given)))
        for each in found:
            click.echo(f"{each.verdict:<5} {each.what}: {each.text}")
        sys.exit(1 if any(each.verdict == "FAIL" for each in found) else 0)
