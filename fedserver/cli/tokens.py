"""Commands for join tokens, for tokens of the dashboard, and for revoking devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from attune.common import aio
from attune.common.command_group import NAME
from attune.common.errors import SettingError
from attune.fedserver.cli.shared import HOME, admin_of, place_of, wake


@click.group(invoke_without_command=True)
@HOME
@click.option("--uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices may join with it.")
@click.option("--ttl", default="24h", show_default=True, help="How long it is valid: 30m, 24h, 7d.")
@click.option(
    "--for",
    "only_for",
    type=NAME,
    metavar="NAME",
    default="",
    help="For this device alone: its certificate has expired, its enrolment was lost, or the name was revoked.",
)
@click.pass_context
def token(context: click.Context, home: Path | None, uses: int, ttl: str, only_for: str) -> None:
    """Print only a join token for a new device; on a terminal also how many devices it admits."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    place, admin = admin_of(home)
    key = place.open_authority().public_key_compressed
    if only_for and (unknown := aio.run(admin.unknown(only_for))):
        click.echo(f"{unknown}: this token admits a new device of that name, or one whose enrolment was lost", err=True)
    click.echo(aio.run(admin.new_token(key, uses, _seconds(ttl), only_for=only_for)))
    whom = only_for or ("one new device" if uses == 1 else f"{uses} new devices")
    if sys.stderr.isatty():  # a pipe may carry both, and then the token is not alone
        click.echo(f"this token admits {whom}, for {ttl}", err=True)
    wake(place)


@token.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
@click.pass_obj
def list_tokens(outer: Path | None, home: Path | None, as_json: bool) -> None:
    """List the join tokens of this home: how many devices each admits, and which have joined with it."""
    import msgspec

    _, admin = admin_of(home or outer)
    tokens = aio.run(admin.tokens())
    if as_json:
        click.echo(msgspec.json.encode(tokens))
    else:
        from attune.fedserver.view.status_text import render_tokens

        click.echo(render_tokens(tokens))


@token.command("revoke")
@HOME
@click.argument("id")
@click.option("--devices", is_flag=True, help="Revoke all devices that have joined with it too.")
@click.pass_obj
def revoke_token(outer: Path | None, home: Path | None, id: str, devices: bool) -> None:
    """Withdraw the join token ID (`fedserver token list`): it admits no device any more."""
    place, admin = admin_of(home or outer)
    revoked = aio.run(admin.revoke_token(id, devices))
    wake(place)
    click.echo(f"the token {id} is withdrawn")
    for name in revoked:
        click.echo(f"{name} is revoked")


@click.command()
@HOME
@click.argument("name", type=NAME)
def revoke(home: Path | None, name: str) -> None:
    """Refuse the device NAME and its certificates from now on, and end its stream."""
    place, admin = admin_of(home)
    aio.run(admin.revoke(name))
    wake(place)
    click.echo(f"{name} is revoked")


@click.group("dashboard-token")
def dashboard_token() -> None:
    """Give people tokens of their own for the dashboard: their names stand in the audit log when they act."""


@dashboard_token.command("add")
@HOME
@click.option("--role", type=click.Choice(["viewer", "operator"]), required=True, help="A viewer only looks.")
@click.argument("name", type=NAME)
def add_dashboard_token(home: Path | None, name: str, role: Literal["viewer", "operator"]) -> None:
    """Print a token for NAME, once: only its digest is kept. On a terminal also the address of the page."""
    from attune.fedserver.identity.admin import user
    from attune.fedserver.web import page_tokens
    from attune.fedserver.web.finished import page_url

    place = place_of(home)
    place.require()
    token = page_tokens.add(place, name, role, f"operator {user()}")
    click.echo(token)
    if sys.stderr.isatty():  # a pipe may carry both, and then the token is not alone
        click.echo(f"{name} is a {role}: {page_url(place, token) or 'the page is off'}", err=True)


@dashboard_token.command("list")
@HOME
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def list_dashboard_tokens(home: Path | None, as_json: bool) -> None:
    """List who has a token for the dashboard, with the role and the time at which it was made."""
    import msgspec

    from attune.fedserver.view.status_text import render_dashboard_tokens
    from attune.fedserver.web import page_tokens

    place = place_of(home)
    place.require()
    tokens = [{"name": token.name, "role": token.role, "made_at": token.made_at} for token in page_tokens.listed(place)]
    click.echo(msgspec.json.encode(tokens) if as_json else render_dashboard_tokens(tokens))


@dashboard_token.command("remove")
@HOME
@click.argument("name", type=NAME)
def remove_dashboard_token(home: Path | None, name: str) -> None:
    """Refuse the token of NAME from now on, and end the pages that are open with it."""
    from attune.fedserver.identity.admin import user
    from attune.fedserver.web import page_tokens

    place = place_of(home)
    place.require()
    page_tokens.remove(place, name, f"operator {user()}")
    click.echo(f"{name} has no token for the dashboard any more")


def _seconds(text: str) -> float:
    """Read a time such as `30m`, `24h`, `7d`, or seconds.

    Raises:
        SettingError: The text is none.
    """
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3650 * 86400:
        raise SettingError(f"--ttl takes a time such as 30m, 24h or 7d, not {text!r}")
    return seconds
