"""The storage of one federation in a folder: a SQLite database, an audit log, and blobs as files.

This module owns `state.sqlite`, `audit.jsonl`, and the folders of blobs (`state/`, `inbox/`, `serve/`, `redo/`, `uploads/`).
`fedserver.home` owns the rest of a home: keys, lock, address, earlier runs.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from typing_extensions import Self

from attune.common.durable import PRIVATE, sync, write_file
from attune.common.errors import HomeMismatch
from attune.fedserver.ports.blobs import INBOX, STATE, is_later
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.folder import FolderBlobs, FolderSpool, clear_folders, link, make_folders
from attune.fedserver.stores.inbox import ENTRY
from attune.fedserver.stores.sqlite import AUDIT_FILE, SqliteLedger, SqliteReader, migrate

DATABASE_FILE = "state.sqlite"
OF_THE_HOME = ("certificates", "tokens", "refusals")  # tables that stay with the home when a run is put aside


class DiskStorage:
    """A server's storage in one folder: SQLite for the ledger, a file for each blob. Implements ports.storage.HomeStorage."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._database = folder, folder / DATABASE_FILE

    @cached_property
    def ledger(self) -> SqliteLedger:
        """The ledger; a new one where there is none. Call `check_ledger` first: opening a damaged file would lose its log."""
        return SqliteLedger(self._database)

    @cached_property
    def blobs(self) -> FolderBlobs:
        """The blobs, of which this process checks each once."""
        return FolderBlobs(self._folder)

    @cached_property
    def spool(self) -> FolderSpool:
        """The uploads. A sealed one is known to the blobs."""
        return FolderSpool(self.blobs)

    def reader(self) -> SqliteReader:
        return SqliteReader(self._database)

    def news(self) -> None:
        """Return None: commands on this machine wake the server."""

    async def close(self) -> None:
        if "ledger" in self.__dict__:
            await self.ledger.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- a start

    def alone(self, waits: Callable[[str], None] | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the home has a lock, and nothing else can write to the folder

    def exists(self) -> bool:
        return self._database.exists()

    def check(self, authority: Path) -> None:
        # The ledger is made first and the authority last. So an authority or state without a ledger was not left by a crash.
        state = self._folder / STATE
        remains = [path for path in (authority, state, self._folder / INBOX) if _holds_something(path)]
        if remains and not self.exists():
            raise HomeMismatch(
                f"{self._database} is missing, but {remains[0]} is of a federation: restore the database from a backup, "
                "or use a new --home"
            )
        if _holds_something(state) and not authority.exists():
            raise HomeMismatch(
                f"{self._folder} has state but no certificate authority: restore {authority.parent}, or use a new --home"
            )

    def check_ledger(self) -> None:
        if self.exists():
            with contextlib.closing(self.reader()) as reader:
                reader.check()

    def create(self) -> None:
        make_folders(self._folder)

    def bound_cache(self, most_bytes: int) -> None:
        """No-op: there are no copies."""

    def clear_blobs(self) -> None:
        clear_folders(self._folder)

    # --- copies

    def copy_run(self, to: Path) -> None:
        (to / STATE).mkdir(mode=0o700, parents=True)
        copy = to / DATABASE_FILE
        _copy_database(self._database, copy)
        with contextlib.closing(sqlite3.connect(copy)) as db:
            migrate(db, copy)
            for table in OF_THE_HOME:
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - names of tables
            db.execute("UPDATE devices SET connected = 0")
            db.commit()
            db.execute("VACUUM")
        sync(copy)
        for path in (self._folder / STATE).iterdir():
            shutil.copyfile(path, to / STATE / path.name)
            sync(to / STATE / path.name)
        for folder in (to / STATE, to):
            sync(folder)

    def set_aside(self, aside: Path, named: Callable[[Snapshot], Iterable[str]]) -> Snapshot:
        # Files of the state are never changed, only replaced by others, so a link is as good as a copy.
        aside.mkdir(mode=0o700)
        _copy_database(self._database, aside / DATABASE_FILE)
        with contextlib.closing(SqliteReader(aside / DATABASE_FILE)) as reader:
            snapshot = reader.snapshot()
        for name in named(snapshot):
            link(self._folder / name, aside / name)
        self._link_inbox(aside, snapshot.record.round)
        log = self._folder / AUDIT_FILE
        if log.exists():  # it grows while it is read: whole lines only
            data = log.read_bytes()
            write_file(aside / log.name, data[: data.rfind(b"\n") + 1], durable=False)
        return snapshot

    def _link_inbox(self, aside: Path, closed: int) -> None:
        """Link whole updates only. One that goes away meanwhile need not be there: its device hands it in again.

        Answers to rounds that the copied ledger does not know yet stay out: beside them it would count as an old copy.
        """
        entries = sorted((self._folder / INBOX).glob(f"*/{ENTRY}"))
        for entry in (path for path in entries if not is_later(path.relative_to(self._folder).as_posix(), closed)):
            with contextlib.suppress(FileNotFoundError):
                for path in [*(path for path in entry.parent.iterdir() if path != entry), entry]:
                    link(path, aside / path.relative_to(self._folder))


@contextlib.contextmanager
def scratch_blobs(beside: Path) -> Iterator[FolderBlobs]:
    """Give blobs in a new folder of the folder `beside`, which goes at the end of the block."""
    with TemporaryDirectory(dir=beside) as folder:
        yield FolderBlobs(Path(folder))


def _copy_database(source: Path, copy: Path) -> None:
    """Copy the database as it is at one moment, beside a server that writes."""
    read_only = f"{source.absolute().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(read_only, uri=True)) as running,
        contextlib.closing(sqlite3.connect(copy)) as other,
    ):
        running.backup(other)
    copy.chmod(PRIVATE)


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
