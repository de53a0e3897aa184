"""Command `fedserver report`, and `attune.report`."""

from __future__ import annotations

from pathlib import Path

import click

from attune.common import homes
from attune.common.command_group import FILE, NAME
from attune.fedserver.cli.shared import HOME


@click.command("report")
@HOME
@click.option("--out", type=FILE, required=True, help="File to write, such as report.html.")
@click.option("--question", default="", help="What is to be decided, for the head of the page.")
@click.option("--run", type=NAME, default="", metavar="NAME", help="An earlier run (default: the present one).")
def report_command(home: Path | None, out: Path, question: str, run: str) -> None:
    """Write one page for people who decide: what each site gained, what left it, and what cannot be said.

    It needs no network and no script, and can be printed.
    """
    click.echo(report(out, question, home, run))


def report(out: str | Path, question: str = "", home: str | Path | None = None, run: str = "") -> Path:
    """Write the page of a run of a server's home, as the seam says."""
    from attune.common.plan import run_name
    from attune.features.report.report_page import write_report
    from attune.fedserver.home import ServerHome
    from attune.fedserver.view.homes import status_of

    place = ServerHome(Path(home).expanduser() if home is not None else homes.server_home())
    place.require()
    if run not in ("", run_name(place.snapshot().run)):
        place = ServerHome(place.runs / run)
        place.require()
    return write_report(Path(out).expanduser(), place.snapshot(), status_of(place), question)
