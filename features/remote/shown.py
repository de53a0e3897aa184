"""Command `fedserver migrate`."""

from __future__ import annotations

from pathlib import Path

import click

from attune.fedserver.cli.shared import ALLOW_CODE, HOME, place_of


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
    from attune.features.remote.migrate import migrate as move

    for line in move(place_of(home), to, allow_code):
        click.echo(line)
