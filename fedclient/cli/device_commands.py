"""Commands for this device and its site's files: join, doctor, verify, disclosed; describe a table, and make a shard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune.common import aio
from attune.common.command_group import FILE, FOLDER, PATH
from attune.common.durable import check_file
from attune.fedclient.cli.shared import (
    data_option,
    home_option,
    name_option,
    server_option,
    through_proxy,
    timeout_option,
    token_file_option,
    token_in,
)
from attune.fedclient.table_options import read_options, table_options

if TYPE_CHECKING:
    from attune.fedclient.address import Proxy, ServerAddress
    from attune.fedclient.options import DeviceOptions


@click.command()
@server_option(required=True)
@click.option("--token", help="The join token that `fedserver token` printed.")
@token_file_option
@data_option(
    "Enrol a device for each of these shards; each uses the token once. Default: one device, for the shard that starts first."
)
@name_option
@home_option
@timeout_option
@through_proxy
def join(
    server: str,
    token: str | None,
    token_file: str | None,
    data: tuple[str, ...],
    name: str | None,
    home: Path | None,
    connect_timeout: float,
    proxy: Proxy | None,
) -> None:
    """Enrol this device with a server, once."""
    from attune.fedclient.address import ServerAddress

    token = token_in(token, token_file)
    if token is None:
        raise click.UsageError("Missing option '--token' or '--token-file'.")
    address = ServerAddress.parse(server).by(proxy)
    if data:
        from attune.fedclient import fleet

        fleet.join(_members(data, address, home, name, token, connect_timeout), click.echo)
        return
    from attune.common import homes
    from attune.fedclient.home import DeviceHome, DeviceInfo, check_asked_name
    from attune.fedclient.link.enrol import enrol, stay_enrolled

    where = DeviceHome(home or homes.joined_home(address.host, address.port))
    record = DeviceInfo(name or "", str(address))
    with where.locked():
        identity = where.identity()
        if identity is not None:
            check_asked_name(where, name, identity)
            aio.run(stay_enrolled(where, identity, address, token, connect_timeout, click.echo))
            return
        identity = aio.run(enrol(where, record, address, token, connect_timeout, click.echo))
    click.echo(f"enrolled as {identity.name}; now: fedclient --data SHARD --server {address}")


def _members(
    data: tuple[str, ...], address: ServerAddress, home: Path | None, name: str | None, token: str, connect_timeout_s: float
) -> list[DeviceOptions]:
    from attune.fedclient import shards
    from attune.fedclient.options import DeviceOptions

    common = DeviceOptions(Path(data[0]), address, home, name, token=token, connect_timeout_s=connect_timeout_s)
    return shards.members(shards.expand(data), common)


@click.command()
@data_option("The shard to train on. Several, or a quoted pattern, are also compared with each other.")
@server_option()
@table_options
@home_option
@through_proxy
def doctor(data: tuple[str, ...], server: str | None, home: Path | None, proxy: Proxy | None, **given: Any) -> None:
    """Check whether this device can take part: machine, data, home, server. The exit code is 1 if it cannot."""
    from attune.fedclient.doctor import examine

    findings = list(examine(data, server, home, read_options(given), proxy))
    for finding in findings:
        click.echo(f"{finding.verdict:<5} {finding.what}: {finding.text}")
    sys.exit(1 if any(finding.verdict == "FAIL" for finding in findings) else 0)


@click.command()
@data_option("The device's shard. A quoted pattern checks the homes of several devices.")
@server_option()
@home_option
def verify(data: tuple[str, ...], server: str | None, home: Path | None) -> None:
    """Compare every file of this device's home with its digest. The exit code is 4 if a file is damaged."""
    from attune.common.errors import HomeMismatch
    from attune.fedclient.doctor import damages, meant

    reports = [(place, list(damages(place))) for place in meant(home, server, data)]
    for place, lines in reports:
        for line in lines or [f"{place.path} is whole"]:
            click.echo(line)
    sys.exit(HomeMismatch.exit_code if any(lines for _, lines in reports) else 0)


@click.command()
@data_option("The device's shard. A quoted pattern means several devices.")
@server_option()
@home_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each device.")
def disclosed(data: tuple[str, ...], server: str | None, home: Path | None, as_json: bool) -> None:
    """Show what has left this device: each kind of message with count, bytes and what the last one said."""
    from attune.fedclient.disclosure_log import FILE, as_object, lines_of, read_log
    from attune.fedclient.doctor import meant
    from attune.fedclient.model.model_info import read_info

    for place in meant(home, server, data):
        log = read_log(place.path / FILE)
        if as_json:
            click.echo(json.dumps({"home": str(place.path)} | as_object(log)))
        else:
            click.echo(f"{place.path}:")
            for line in lines_of(log):
                click.echo(line)
            if place.model.exists() and (names := read_info(place.model).contains_samples):
                click.echo(f"{place.model} holds training samples ({', '.join(names)}): who gets that folder gets them")


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
