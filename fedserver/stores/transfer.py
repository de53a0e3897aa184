"""Copies of a storage at another place: all rows of the ledger, the audit log, and all blobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from attune.common.durable import sync, write_file
from attune.common.errors import HomeMismatch
from attune.common.wire.blobs import Blob, digest_in, read_frames
from attune.fedserver.ports.blobs import Blobs, Damaged
from attune.fedserver.ports.ledger import Refusal
from attune.fedserver.stores.audit import head_of
from attune.fedserver.stores.checked_blobs import CheckedBlobs
from attune.fedserver.stores.database import Database
from attune.fedserver.stores.row_digests import SCHEMA_KEY
from attune.fedserver.stores.sqlite import SqliteDatabase
from attune.fedserver.stores.tables import CERTIFICATE, DEVICE, TOKEN

IDENTITY, TERM, MOVING = (
    "storage",
    "term",
    "moving",
)  # keys of the table `meta` that belong to a place: see features.remote
COLUMNS = {
    "meta": "key, value", "devices": DEVICE, "certificates": CERTIFICATE, "tokens": TOKEN,
    "refusals": ", ".join(Refusal.__dataclass_fields__), "slots": "part, key, file, digest, size",
    "metrics": "round, work, client, row",
}  # fmt: skip
OF_THE_PLACE = f"key NOT IN ('{IDENTITY}', 'term', '{MOVING}', '{SCHEMA_KEY}')"


def copy_rows(source: Database, target: Database, but: Collection[str] = ()) -> None:
    """Copy all tables but `but` into empty ones. Call it within a moment of the source and a transaction of the target.

    What an unfinished move has left there (MOVING) is removed before.

    Raises:
        HomeMismatch: The target holds a federation.
    """
    is_left = target.execute(f"SELECT 1 FROM meta WHERE key = '{MOVING}'").fetchone() is not None  # noqa: S608
    for table, columns in COLUMNS.items():
        which = f"{table} WHERE {OF_THE_PLACE}" if table == "meta" else table
        if is_left:
            target.execute(f"DELETE FROM {which}")  # noqa: S608
        if target.execute(f"SELECT 1 FROM {which} LIMIT 1").fetchone() is not None:  # noqa: S608 - names of the schema
            raise HomeMismatch("the place to move to holds a federation already: choose an empty database")
        if table not in but:
            marks = ", ".join("?" for _ in columns.split(", "))
            order = "rowid" if table == "tokens" else "1"
            for row in source.execute(f"SELECT {columns} FROM {which} ORDER BY {order}"):  # noqa: S608
                target.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(row))  # noqa: S608


def copy_audit(lines: Iterable[bytes], target: Database) -> None:
    """Copy the lines of an audit log in place of those of an unfinished move."""
    target.execute("DELETE FROM audit")
    for line in lines:
        target.execute("INSERT INTO audit (number, line) VALUES (?, ?)", (head_of(line).number, line))


def copy_blobs(source: CheckedBlobs, target: Blobs, areas: Iterable[str]) -> Iterator[Blob]:
    """Copy all blobs whose names begin with one of `areas`, and yield each. What is there already is left; others go.

    Raises:
        Damaged: A blob is not what was written, before or after it was copied.
    """
    for area in areas:
        names = source.names(area)
        target.remove(sorted(set(target.names(area)) - set(names)))
        for name in names:
            with closing(source.source(name)) as opened:
                blob = Blob(name, digest_in(opened), opened.size)
            try:
                target.check(blob)
            except Damaged:
                _copy(source, target, blob)
                target.check(blob)
            yield blob


def _copy(source: CheckedBlobs, target: Blobs, blob: Blob) -> None:
    into, at = target.create(blob.name, blob.size), 0
    try:
        for frame in read_frames(source.source(blob.name), 0):
            into.write(memoryview(frame), at)
            at += len(frame)
        into.finish(blob.digest, at)
    finally:
        into.abort()


def write_database(path: Path, source: Database, but: Collection[str] = ()) -> None:
    """Write a new SQLite database with the rows of `source`, whole or not at all; a file that is there is replaced."""
    filling = path.with_name(f".{path.name}.filling")
    for left in (filling, *path.parent.glob(f"{path.name}-*"), *path.parent.glob(f"{filling.name}-*")):
        left.unlink(missing_ok=True)
    with closing(SqliteDatabase.opened(filling)) as target, source.moment():
        with target.transaction():
            copy_rows(source, target, but)
            if but:  # a run that is over
                target.execute("UPDATE devices SET connected = 0")
        target.settle()
    sync(filling)
    filling.replace(path)
    sync(path.parent)


def write_audit(path: Path, source: Database) -> None:
    """Write the audit log of a database into a file."""
    lines = [bytes(row[0]) for row in source.execute("SELECT line FROM audit ORDER BY number")]
    write_file(path, b"".join(line + b"\n" for line in lines))
