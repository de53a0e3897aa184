"""Commands that keep a home whole: its log, its copies, its digests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from attune.common.command_group import NAME
from attune.common.errors import HomeMismatch
from attune.common.text import clean
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, place_of

if TYPE_CHECKING:
    from attune.fedserver.ports.ledger import AuditEntry


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
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder to write to.")
def backup(home: Path | None, out: Path) -> None:
    """Copy all that a federation needs into a folder, beside a running server too."""
    from attune.fedserver.home import BACKUP_MADE
    from attune.fedserver.identity.admin import user
    from attune.fedserver.view.backup import back_up

    place = place_of(home)
    place.require()
    for line in back_up(place, out):
        click.echo(line)
    place.note(BACKUP_MADE, f"operator {user()}", folder=str(out))


@click.command()
@click.option("--home", type=click.Path(path_type=Path), required=True, help="The new folder of the server's state.")
@click.option("--from", "source", type=click.Path(path_type=Path), required=True, help="What `fedserver backup` wrote.")
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
    from attune.fedserver.identity.admin import user
    from attune.fedserver.view.backup import restore_to

    place = place_of(home)
    for line in restore_to(source, place, audit_log, readmit, allow_code):
        click.echo(line)
    place.note("restored", f"operator {user()}", folder=str(source))


@click.command()
@HOME
def verify(home: Path | None) -> None:
    """Compare every file of the home with its digest; print a line for each that is damaged, with exit code 4."""
    from attune.fedserver.view.backup import damages

    place = place_of(home)
    place.require()
    damage = list(damages(place))
    for line in damage:
        click.echo(line)
    if damage:
        sys.exit(HomeMismatch.exit_code)
    click.echo(f"{place.path} is whole")


@click.command()
@HOME
@click.option("--ledger", metavar="postgresql://...", help="An empty database, with --blobs.")
@click.option("--blobs", metavar="s3://BUCKET/PREFIX", help="An empty prefix, with --ledger.")
@click.option("--to-folder", is_flag=True, help="Back into the home's folder.")
@ALLOW_CODE
def migrate(home: Path | None, ledger: str | None, blobs: str | None, to_folder: bool, allow_code: tuple[str, ...]) -> None:
    """Move the state of a home to PostgreSQL and S3, or back. No server may run. A move that was killed goes on."""
    from attune.fedserver.home import place_of as storage_place_of

    to = storage_place_of(ledger, blobs)
    if (to is None) is not to_folder:
        raise click.UsageError("give --ledger and --blobs, or --to-folder")
    from attune.fedserver.view.migrate import migrate as move

    for line in move(place_of(home), to, allow_code):
        click.echo(line)


LONGEST = 600  # characters of a line


def lines_of(entries: Iterable[tuple[AuditEntry, str]], as_json: bool) -> Iterator[str]:
    """Yield each entry of the audit log as a line, for people or as JSON."""
    for entry, digest in entries:
        if as_json:
            yield msgspec.json.encode(msgspec.structs.asdict(entry) | {"digest": digest}).decode()
        else:
            facts = " ".join(f"{key}={_value(value)}" for key, value in entry.facts.items() if value not in ("", None))
            yield clean(f"{entry.number} {entry.at[:19]}Z {entry.event}, by {entry.by}: {facts}", LONGEST)


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
