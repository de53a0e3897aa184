"""Commands for tokens and for revoking devices, and those that keep a home whole: its log, its copies, its digests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from attune.common.command_group import FOLDER, NAME, PATH
from attune.common.errors import HomeMismatch, SettingError
from attune.common.text import clean
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, admin_of, answer_of, existing, operator, place_of, wake

if TYPE_CHECKING:
    from attune.fedserver.ports.ledger import AuditEntry


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
@click.option("--tag", default="", metavar="NAME", help="A tag of the devices that join with it (round.devices).")
@click.pass_context
def token(context: click.Context, home: Path | None, uses: int, ttl: str, only_for: str, tag: str) -> None:
    """Print only a join token for a new device; on a terminal also how many devices it admits."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    place, admin = admin_of(home)
    key = place.open_authority().public_key_compressed
    if only_for and (unknown := answer_of(admin.unknown(only_for))):
        click.echo(f"{unknown}: this token admits a new device of that name, or one whose enrolment was lost", err=True)
    click.echo(answer_of(admin.new_token(key, uses, _seconds(ttl), only_for=only_for, tag=tag)))
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
    tokens = answer_of(admin.tokens())
    if as_json:
        click.echo(msgspec.json.encode(tokens))
    else:
        from attune.fedserver.view.homes import render_tokens

        click.echo(render_tokens(tokens))


@token.command("revoke")
@HOME
@click.argument("id")
@click.option("--devices", is_flag=True, help="Revoke all devices that have joined with it too.")
@click.pass_obj
def revoke_token(outer: Path | None, home: Path | None, id: str, devices: bool) -> None:
    """Withdraw the join token ID (`fedserver token list`): it admits no device any more."""
    place, admin = admin_of(home or outer)
    revoked = answer_of(admin.revoke_token(id, devices))
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
    answer_of(admin.revoke(name))
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


@click.command()
@HOME
@click.option("--last", type=click.IntRange(1), help="Show only so many entries, the latest.")
@click.option("--json", "as_json", is_flag=True, help="The lines as they are in the file.")
@click.option("--contains", metavar="DIGEST", help="Fail unless this entry, noted before, is still in the log.")
def audit(home: Path | None, last: int | None, as_json: bool, contains: str | None) -> None:
    """Show who was let in, refused or shut out and which settings changed; exit code 4 if the log is damaged."""
    place = place_of(home)
    with place.reading() as reader:
        entries = list(reader.audit())
    for line in lines_of(entries[-last:] if last else entries, as_json):
        click.echo(line)
    if contains is not None and contains not in (digest for _, digest in entries):
        raise HomeMismatch(f"the entry {contains} is not in the audit log of {place.path}: the log was cut or replaced")
    if not as_json:
        click.echo(f"{len(entries)} entries, each follows the one before; the last is {entries[-1][1] if entries else 'none'}")


@click.command()
@HOME
@click.option("--out", type=FOLDER, required=True, help="A new folder to write to.")
def backup(home: Path | None, out: Path) -> None:
    """Copy all that a federation needs into a folder, beside a running server too."""
    from attune.fedserver.home import BACKUP_MADE
    from attune.fedserver.view.backup import back_up

    place = existing(home)
    for line in back_up(place, out):
        click.echo(line)
    place.note(BACKUP_MADE, operator(), folder=str(out))


@click.command()
@click.option("--home", type=PATH, required=True, help="The new folder of the server's state.")
@click.option("--from", "source", type=PATH, required=True, help="What `fedserver backup` wrote.")
@click.option(
    "--audit-log",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The audit.jsonl of the home that is replaced, so that devices revoked since the backup stay revoked.",
)
@click.option("--readmit", multiple=True, type=NAME, metavar="NAME", help="Let in this device, although it was revoked since.")
@ALLOW_CODE
def restore(home: Path, source: Path, audit_log: Path | None, readmit: tuple[str, ...], allow_code: tuple[str, ...]) -> None:
    """Make a home of a backup, after every byte of it was verified; exit code 4 if it is damaged.

    Devices that were revoked after the backup was made stay revoked, if the newer audit log is there.
    """
    from attune.fedserver.view.backup import restore_to

    place = place_of(home)
    for line in restore_to(source, place, audit_log, readmit, allow_code):
        click.echo(line)
    place.note("restored", operator(), folder=str(source))


@click.command()
@HOME
def verify(home: Path | None) -> None:
    """Compare every file of the home with its digest; print a line for each that is damaged, with exit code 4."""
    from attune.fedserver.view.backup import damages

    place = existing(home)
    damage = list(damages(place))
    for line in damage:
        click.echo(line)
    if damage:
        sys.exit(HomeMismatch.exit_code)
    click.echo(f"{place.path} is whole")


LONGEST = 600  # characters of a line


def lines_of(entries: Iterable[tuple[AuditEntry, str]], as_json: bool) -> Iterator[str]:
    """Yield each entry of the audit log as a line, for people or as JSON."""
    for entry, digest in entries:
        if as_json:
            yield msgspec.json.encode(msgspec.structs.asdict(entry) | {"digest": digest}).decode()
        else:
            known = {key: value for key, value in entry.facts.items() if value not in ("", None)}
            facts = " ".join(
                f"{key}={v if isinstance(v, str) else msgspec.json.encode(v).decode()}" for key, v in known.items()
            )
            yield clean(f"{entry.number} {entry.at[:19]}Z {entry.event}, by {entry.by}: {facts}", LONGEST)
