"""Commands for this device itself: join, doctor, verify and disclosed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune.common import aio
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
