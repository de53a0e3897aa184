"""`fedserver statistics`: what the connected devices' data look like, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import click

from attune.common.errors import SettingError
from attune.fedserver.cli.shared import HOME, place_of


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
