"""Shards: made of a device's own data, or cut of a data set for experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.fedclient.cli.options import reported
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
    with reported():
        from attune.fedclient.data.makers.make import make
        from attune.fedclient.data.makers.options import MakeOptions

        made = make(source, MakeOptions.of(read_options(given), text, length, size, grey, classes, tokenizer), out)
        for warning in made.warnings:
            click.echo(f"warning: {warning}")
        click.echo(f"{out}: {made.described}")
        click.echo(f"now: fedclient --data {out} --server HOST:PORT")


@click.command()
@click.option("--dataset", metavar="digits|PATH", help="The bundled digits, or files of your own: docs/data.md has the forms.")
@click.option("--scheme", required=True, metavar="SCHEME", help="How to cut: iid, pathological, dirichlet, ... (docs/data.md).")
@click.option("--clients", type=int, help="How many shards, unless the scheme or the data fix it.")
@click.option("--classes-per-client", type=int, help="pathological, two-class-unequal: classes of each.  [default: 2]")
@click.option("--alpha", type=float, help="dirichlet, pachinko: smaller is more unequal [default: 0.3]; synthetic [0.5].")
@click.option("--by", metavar="NAME", help="natural: the column or array that names the client.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any other setting of the scheme.")
@click.option(
    "--label", default="", metavar="NAME", help="The column or array with the classes; NAME>NUMBER makes two classes."
)
@click.option("--apart", multiple=True, metavar="NAME", help="A column of a table that is not a feature.")
@click.option("--shape", default="", metavar="SIZES", help="Shape of one sample, such as 28x28, if the file has flat samples.")
@click.option("--missing", default="refuse", show_default=True, metavar="HOW", help="NaN: refuse, or median of the column.")
@click.option("--normalise", metavar="HOW", help="none, channel, pixel, cifar10 or cifar100.  [default: the scheme's]")
@click.option("--noise", type=float, default=0.0, metavar="SIGMA", help="Noise that rises from 0 for the first client to this.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the shards.")
def partition(classes_per_client: int | None, alpha: float | None, by: str | None, **given: Any) -> None:
    """Cut a data set into shards, for experiments."""
    with reported():
        from attune.fedclient.partition import command as partitioning

        flags = {"classes_per_client": classes_per_client, "alpha": alpha, "by": by}
        request = partitioning.Request(flags=flags, **given)
        partitioning.run(request, click.echo, lambda text: click.echo(f"fedclient: {text}", err=True))
