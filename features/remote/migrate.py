"""`fedserver migrate`: the state of a home goes to PostgreSQL and S3, or back into the folder.

Blobs are copied first, then all rows in one transaction; each is compared with its digest. The switch is the file storage.json:
until it is written (or removed), the old place counts, and a move that was killed is begun again and goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import closing

from attune.common.durable import sync
from attune.common.errors import HomeMismatch, SettingError
from attune.features.remote.postgres import TABLES, TERM
from attune.features.remote.s3 import IN_S3, OWNER
from attune.features.remote.storage import RemoteStorage
from attune.fedserver.consent import check_consent
from attune.fedserver.home import STORAGE_FILE, ServerHome, StoragePlace
from attune.fedserver.ports.ledger import LedgerReader
from attune.fedserver.stores.database import Database, put_value
from attune.fedserver.stores.disk import DATABASE_FILE, DiskStorage
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.sqlite import AUDIT_FILE, SqliteDatabase
from attune.fedserver.stores.transfer import (
    COLUMNS,
    IDENTITY,
    MOVING,
    copy_audit,
    copy_blobs,
    copy_rows,
    write_audit,
    write_database,
)
from attune.fedserver.view.backup import damages

LEFT_TABLES = (*TABLES, "commits", "schema_version")


def migrate(home: ServerHome, to: StoragePlace | None, allowed: Collection[str] = ()) -> Iterator[str]:
    """Move the state of a home, and yield lines that say what was done.

    Args:
        home: The home. No server may run.
        to: The place; None: the home's folder.
        allowed: Code of its own that the home may bring, by name.

    Raises:
        HomeMismatch: The state is damaged, or the place holds a federation.
        HomeBusy: A server runs on the home.
        SettingError: The state is at a third place, or names code without consent.
    """
    with home.locked():
        now = home.storage_place()
        if now is not None and to not in (None, now):
            raise SettingError("the state of this home is in another database: move it into the folder first (--to-folder)")
        if now != to:
            check_consent(home, home.snapshot(), allowed)
            if lines := list(damages(home)):
                raise HomeMismatch(f"{lines[0]}; nothing was moved")
            yield from _into_folder(home) if to is None else _out_of_folder(home, to)
        elif now is None:
            yield "the state is in the folder already"
        if to is not None:
            _empty_folder(home)
            _finish(_remote(home, to).database)
            yield f"the state of {home.path} is in {to.ledger} and {to.blobs}; keep its folder ca/ for the next server"


def _out_of_folder(home: ServerHome, to: StoragePlace) -> Iterator[str]:
    storage = _remote(home, to)
    storage.create()
    blobs = sum(1 for _ in copy_blobs(FolderBlobs(home.path), storage.blobs, IN_S3))
    with closing(SqliteDatabase.opened(home.path / DATABASE_FILE)) as source, source.transaction():  # commands wait meanwhile
        log = home.path / AUDIT_FILE
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        with storage.database.transaction():
            copy_rows(source, storage.database)
            copy_audit(lines, storage.database)
            put_value(storage.database, MOVING, "here")
        _compare(DiskStorage(home.path).reader(), storage.reader())
        home.write_storage_place(to)
    yield f"{blobs} blobs and the ledger were copied and verified"


def _into_folder(home: ServerHome) -> Iterator[str]:
    place = home.storage_place()
    assert place is not None  # noqa: S101 - `migrate` has looked
    storage = _remote(home, place)
    blobs = sum(1 for _ in copy_blobs(storage.blobs, FolderBlobs(home.path), IN_S3))
    write_audit(home.path / AUDIT_FILE, storage.database)
    write_database(home.path / DATABASE_FILE, storage.database)
    _compare(storage.reader(), DiskStorage(home.path).reader())
    put_value(storage.database, MOVING, "away")  # from here on no server begins there
    (home.path / STORAGE_FILE).unlink()
    sync(home.path)
    yield f"{blobs} blobs and the ledger were copied and verified"
    storage.blobs.remove([name for area in IN_S3 for name in storage.blobs.names(area)])
    with storage.database.transaction():
        for table in (*COLUMNS, "audit"):
            # Database and prefix go on being a pair, and no term is ever used twice.
            kept = f"key IN ('{IDENTITY}', '{TERM}')" if table == "meta" else "FALSE"
            storage.database.execute(f"DELETE FROM {table} WHERE NOT ({kept})")  # noqa: S608 - names of the schema
    yield (
        f"the state is in the folder {home.path}. Its rows and blobs are gone from {place.ledger} and {place.blobs}; "
        f"{len(LEFT_TABLES)} tables and the object {OWNER} stay there, so that no server of before serves: remove them if you "
        "never move back"
    )


def _remote(home: ServerHome, place: StoragePlace) -> RemoteStorage:
    return RemoteStorage(home.path, place.ledger, place.blobs)


def _finish(db: Database) -> None:
    """Note that a move to this database is finished."""
    db.execute(f"DELETE FROM meta WHERE key = '{MOVING}'")  # noqa: S608


def _empty_folder(home: ServerHome) -> None:
    """Remove what the folder held before its state went to another place."""
    for path in (*home.path.glob(f"{DATABASE_FILE}*"), *home.path.glob(f"{AUDIT_FILE}*")):
        path.unlink(missing_ok=True)
    for area in IN_S3:
        shutil.rmtree(home.path / area, ignore_errors=True)


def _compare(source: LedgerReader, copy: LedgerReader) -> None:
    """Compare two ledgers.

    Raises:
        HomeMismatch: They differ.
    """
    with closing(source), closing(copy):
        copy.check()
        same = source.snapshot() == copy.snapshot() and list(source.audit()) == list(copy.audit())
    if not same:
        raise HomeMismatch("the copy of the ledger is not what it was copied from; nothing was moved: try again")
