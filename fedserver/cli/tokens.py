"""Commands for join tokens, and for revoking devices."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from attune.common import aio
from attune.common.errors import SettingError
from attune.fedserver.cli.shared import HOME, admin_of, wake


@click.group(invoke_without_command=True)
@HOME
@click.option("--uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices may join with it.")
@click.option("--ttl", default="24h", show_default=True, help="How long it is valid: 30m, 24h, 7d.")
@click.option(
    "--for",
    "only_for",
    metavar="NAME",
    default="",
    help="For this device alone, whose certificate has expired or whose enrolment was lost.",
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
@click.argument("name")
def revoke(home: Path | None, name: str) -> None:
    """Refuse the device NAME and its certificates from now on, and end its stream."""
    place, admin = admin_of(home)
    aio.run(admin.revoke(name))
    wake(place)
    click.echo(f"{name} is revoked")


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
