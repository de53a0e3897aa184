"""Commands of `fedserver` for the dashboard: its address, and people's tokens for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click
import msgspec

from attune.common.command_group import FOLDER, NAME
from attune.fedserver.cli.shared import HOME, existing, operator, place_of


@click.command()
@HOME
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of a page that is not served yet (default: a free one)."
)
@click.argument("folder", required=False, type=FOLDER)
def dashboard(home: Path | None, port: int, folder: Path | None) -> None:
    """Print the address of the running server's page, or serve one of the home, which FOLDER can name, too."""
    from attune.features.web import pages
    from attune.features.web.serving import PageAddress

    if folder is not None and home is not None:
        raise click.UsageError("FOLDER stands alone: without --home")
    place = place_of(folder or home)
    if (url := pages.running_page(place)) is not None:
        click.echo(url)
    else:
        pages.show(place, PageAddress(port=port), click.echo)


@click.group("dashboard-token")
def dashboard_token() -> None:
    """Give people tokens of their own for the dashboard: their names stand in the audit log when they act."""


@dashboard_token.command("add")
@HOME
@click.option("--role", type=click.Choice(["viewer", "operator"]), required=True, help="A viewer only looks.")
@click.argument("name", type=NAME)
def add_dashboard_token(home: Path | None, name: str, role: Literal["viewer", "operator"]) -> None:
    """Print a token for NAME, once: only its digest is kept. On a terminal also the address of the page."""
    from attune.features.web import page_tokens
    from attune.features.web.pages import page_url

    place = existing(home)
    token = page_tokens.add(place, name, role, operator())
    click.echo(token)
    if sys.stderr.isatty():  # a pipe may carry both, and then the token is not alone
        click.echo(f"{name} is a {role}: {page_url(place, token) or 'the page is off'}", err=True)


@dashboard_token.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def list_dashboard_tokens(home: Path | None, as_json: bool) -> None:
    """List who has a token for the dashboard, with the role and the time at which it was made."""
    from attune.features.web import page_tokens
    from attune.fedserver.view.homes import minute, text_of, text_table

    place = existing(home)
    tokens = page_tokens.listed(place)
    if as_json:
        click.echo(
            msgspec.json.encode([{"name": token.name, "role": token.role, "made_at": token.made_at} for token in tokens])
        )
    else:
        rows = ((token.name, token.role, minute(token.made_at)) for token in tokens)
        click.echo(text_of(text_table(("name", "role", "made"), rows, "name")))


@dashboard_token.command("remove")
@HOME
@click.argument("name", type=NAME)
def remove_dashboard_token(home: Path | None, name: str) -> None:
    """Refuse the token of NAME from now on, and end the pages that are open with it."""
    from attune.features.web import page_tokens

    place = existing(home)
    page_tokens.remove(place, name, operator())
    click.echo(f"{name} has no token for the dashboard any more")
