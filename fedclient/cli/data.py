"""Shards: made of a device's own data, or cut of a data set for experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.fedclient.table_options import read_options, table_options


@click.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the shard.")
@table_options
@click.option("--text", default="", metavar="NAME", help="The column with text, where samples are text with a class.")
@click.option("--length", type=click.IntRange(1), default=128, show_default=True, help="Characters (or tokens) of a text.")
@click.option(
    "--tokenizer",
    default="",
    metavar="PLACE",
    help="What makes tokens of text: a tokenizer.json or its folder, PATH or PACKAGE:PATH.  [default: characters]",
)
@click.option("--size", default="", metavar="HxW", help="Pixels to which all images are brought.  [default: as they are]")
@click.option("--grey", is_flag=True, help="Images with one channel instead of three.")
@click.option("--classes", default="", metavar="A,B", help="All classes that any device of the federation may have.")
def shard(
    source: Path, out: Path, text: str, length: int, tokenizer: str, size: str, grey: bool, classes: str, **given: Any
) -> None:
    """Make a shard of FILE: a table (.csv, .parquet), a folder of images, a text, or a Hugging Face dataset on disk."""
    from attune.fedclient.data.makers.make import make
    from attune.fedclient.data.makers.options import MakeOptions

    made = make(source, MakeOptions.of(read_options(given), text, length, size, grey, classes, tokenizer), out)
    for warning in made.warnings:
        click.echo(f"warning: {warning}")
    click.echo(f"{out}: {made.described}")
    click.echo(f"now: fedclient --data {out} --server HOST:PORT")
