"""Commands for a site's own files: describe a table, and make a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FILE, FOLDER, PATH
from attune.common.durable import check_file
from attune.fedclient.table_options import read_options, table_options


@click.command()
@click.argument("table", type=PATH, metavar="TABLE")
@table_options
@click.option("--out", type=FILE, metavar="FILE", help="Write the schema: .json for `fedserver schema`, .toml to edit it.")
def describe(table: Path, out: Path | None, **given: Any) -> None:
    """Propose a schema of a table: the kind of each column, with warnings. Nothing leaves this machine."""
    from attune.common.errors import SettingError
    from attune.common.schema_file import write_schema
    from attune.common.text import aligned, clean
    from attune.fedclient.data import findings
    from attune.fedclient.data.describe import describe as propose
    from attune.fedclient.data.samples import table_of
    from attune.fedclient.data.site_sums import unit_verdicts
    from attune.fedclient.data.table import SUFFIXES, may_be_table
    from attune.fedclient.data.table_encoder import TableEncoder

    if not may_be_table(table):
        raise SettingError(f"{table} is no table: describe takes {', '.join(SUFFIXES)}")
    options = read_options(given)
    read = table_of(table, options)
    proposal = propose(read, options)
    rows = [("column", "kind", "unit", "missing", "values")]
    for name, column in proposal.schema.columns.items():
        what = column.why_left_out or ", ".join(column.values)
        rows.append(
            (clean(name), column.kind, clean(column.unit), column.missing if column.is_feature else "", clean(what, 60))
        )
    for line in aligned(rows, left=range(5)):
        click.echo(line)
    findings.show({"": proposal.warnings})
    if options.schema is not None:
        for name, verdict in unit_verdicts(TableEncoder(options.schema).encode(read).x, options.schema).items():
            click.echo(f"unit of {clean(name)}: {verdict}")
    if out is not None:
        check_file(out)
        write_schema(out, proposal.schema)
        click.echo(f"{out}: a schema of {len(proposal.schema.columns)} columns")


@click.command()
@click.argument("source", type=PATH, metavar="FILE")
@click.option("--out", type=FOLDER, required=True, help="Folder for the shard.")
@table_options
@click.option("--text", default="", metavar="NAME", help="The column with text, if the samples are texts with a class.")
@click.option("--length", type=click.IntRange(1), default=128, show_default=True, help="Characters (or tokens) of a text.")
@click.option(
    "--tokenizer", default="", metavar="PLACE",
    help="A tokenizer.json or its folder, as PATH or PACKAGE:PATH, that cuts text into tokens.  [default: characters]",
)  # fmt: skip
@click.option("--size", default="", metavar="HxW", help="Resize all images to H x W pixels.  [default: as they are]")
@click.option("--grey", is_flag=True, help="Images with one channel instead of three.")
@click.option("--classes", default="", metavar="A,B", help="All classes that any device of the federation may have.")
def shard(
    source: Path, out: Path, text: str, length: int, tokenizer: str, size: str, grey: bool, classes: str, **given: Any
) -> None:
    """Make a shard from FILE: a table (.csv, .parquet), a folder of images, a text, or a Hugging Face dataset on disk."""
    from attune.fedclient.data import findings
    from attune.fedclient.data.makers.make import make
    from attune.fedclient.data.makers.make_options import MakeOptions

    made = make(source, MakeOptions.of(read_options(given), text, length, size, grey, classes, tokenizer), out)
    click.echo(made.read)
    findings.show({"": made.warnings})
    click.echo(f"{out}: {made.described}")
    click.echo(f"now: fedclient --data {out} --server HOST:PORT")
