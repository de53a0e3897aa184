"""The storage of one federation in PostgreSQL and S3, with a folder for what belongs to one process or one machine.

The ledger in PostgreSQL has its audit log in a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import Self

from attune.common.errors import HomeMismatch
from attune.features.remote import postgres, s3
from attune.features.remote.lease import Lease
from attune.features.remote.postgres import PostgresDatabase
from attune.features.remote.s3 import IN_S3, OWNER, S3Blobs
from attune.features.remote.s3_objects import ObjectCache, S3Objects
from attune.fedserver.ports.blobs import STATE
from attune.fedserver.ports.ledger import AuditEntry, Certificate, Snapshot
from attune.fedserver.stores import transfer
from attune.fedserver.stores.audit import entries_in, head_of, next_line
from attune.fedserver.stores.database import put_value, value_in
from attune.fedserver.stores.disk import DATABASE_FILE, OF_THE_HOME
from attune.fedserver.stores.folder import FolderBlobs, FolderSpool, clear_folders, make_folders
from attune.fedserver.stores.table_ledger import TableLedger
from attune.fedserver.stores.tables import Tables, certificate_in, snapshot_in


class PostgresLedger(TableLedger):
    """Implements ports.ledger.Ledger: calls are carried out one after the other, but for the question about a certificate."""

    def __init__(self, db: PostgresDatabase) -> None:
        super().__init__(Tables(db))
        self._db = db

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext()  # the database itself does this

    async def note(self, event: str, by: str, **facts: Any) -> None:
        await self._do(self._append, event, by, facts)

    def _append(self, event: str, by: str, facts: dict[str, Any]) -> None:
        with self._db.transaction():
            row = self._db.execute("SELECT line FROM audit ORDER BY number DESC LIMIT 1").fetchone()
            line = next_line(row[0] if row else b"", event, by, facts)
            head = head_of(line)
            self._db.execute("INSERT INTO audit (number, line) VALUES (?, ?)", (head.number, line))
            self._tables.set_audit_head(head)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        return await asyncio.to_thread(certificate_in, self._db, fingerprint)


class PostgresReader:
    """Implements ports.ledger.LedgerReader, over one connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def _db(self) -> PostgresDatabase:
        db = PostgresDatabase(self._url)
        db.prepare()
        return db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (UnicodeError, msgspec.MsgspecError) as error:
            raise _damage(self._url, str(error)) from None

    def snapshot(self, since: int = 0) -> Snapshot:
        with self._errors(), self._db.moment():
            return snapshot_in(self._db, since)

    def audit(self) -> Iterator[tuple[AuditEntry, str]]:
        lines = [bytes(row[0]) for row in self._db.execute("SELECT line FROM audit ORDER BY number")]
        return entries_in(lines, f"the audit log in {self._url}")

    def check(self) -> None:
        if changed := list(islice(self._db.changed(), 3)):
            raise _damage(self._url, "; ".join(changed))
        self.snapshot()

    def was_served(self) -> bool:
        return self._db.execute("SELECT 1 FROM certificates WHERE role = 'operator'").fetchone() is not None

    def close(self) -> None:
        if "_db" in self.__dict__:
            self._db.close()


def _damage(url: str, what: str) -> HomeMismatch:
    return HomeMismatch(f"the database {url} is damaged ({' '.join(what.split())}): restore it from a backup of PostgreSQL")


# The server looks at the decisions themselves. The audit log gets a line before each decision, so a look between the two would
# miss the decision. These numbers cost little with many devices. They only grow, except when old tokens are forgotten.
NEWS = (
    "SELECT CONCAT_WS('/', (SELECT COUNT(*) FROM devices WHERE revoked = 1), MAX(rowid), MAX(withdrawn_at), "
    "COUNT(withdrawn_at)) FROM tokens"
)


class RemoteStorage:
    """A server's storage in PostgreSQL and S3. See ports.storage.HomeStorage. Leaving it as a context manager closes it.

    Args:
        folder: The home: uploads, what is served, and the cache.
        ledger_url: URL of the database, without a password.
        blobs_url: s3://BUCKET/PREFIX.
    """

    def __init__(self, folder: Path, ledger_url: str, blobs_url: str) -> None:
        postgres.check_url(ledger_url)
        s3.check_url(blobs_url)
        self._folder, self._blobs_url = folder, blobs_url
        self.database = PostgresDatabase(ledger_url)

    @cached_property
    def ledger(self) -> PostgresLedger:
        self.database.prepare()
        return PostgresLedger(self.database)

    @cached_property
    def _local(self) -> FolderBlobs:
        return FolderBlobs(self._folder)

    @cached_property
    def _objects(self) -> S3Objects:
        return S3Objects(self._blobs_url)

    @cached_property
    def _cache(self) -> ObjectCache:
        return ObjectCache(self._folder / "cache", self._objects)

    @cached_property
    def blobs(self) -> S3Blobs:
        self.database.prepare()
        return S3Blobs(self._local, self.database, self._objects, self._cache)

    @cached_property
    def spool(self) -> FolderSpool:
        """The uploads, on this machine's disk. A sealed one is known to the blobs."""
        return FolderSpool(self._local)

    def reader(self) -> PostgresReader:
        return PostgresReader(self.database.url)

    def news(self) -> str:
        return str(self.database.execute(NEWS).fetchone()[0])

    async def close(self) -> None:
        if "ledger" in self.__dict__:
            await self.ledger.close()
            del self.ledger
        self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- a start

    def alone(self, waits: Callable[[str], None] | None) -> AbstractContextManager[None]:
        return Lease(self.database).held(waits)

    def exists(self) -> bool:
        return self.database.exists()

    def check(self, authority: Path) -> None:
        if self.exists() and value_in(self.database, transfer.MOVING, str) is not None:
            raise HomeMismatch(
                f"a move to or from {self.database.url} is not finished: run `fedserver migrate` on the home again"
            )
        # The prefix first: meanwhile another server may begin the federation.
        if authority.exists() and self._objects.has(OWNER) and not self.exists():
            raise HomeMismatch(
                f"{authority.parent} is of a federation, but the database {self.database.url} is empty: restore the database, "
                "move the home there with `fedserver migrate`, or use a new --home"
            )
        if not authority.exists() and self.exists() and self._was_served():
            raise HomeMismatch(
                f"the database {self.database.url} holds a federation, but {authority.parent} has no certificate authority: "
                "copy that folder from the server that has it"
            )

    def _was_served(self) -> bool:
        with contextlib.closing(self.reader()) as reader:
            return reader.was_served()

    def check_ledger(self) -> None:
        with contextlib.closing(self.reader()) as reader:
            reader.check()

    def create(self) -> None:
        make_folders(self._folder)
        self.database.prepare()
        with self.database.transaction():
            identity = value_in(self.database, transfer.IDENTITY, str) or secrets.token_hex(16)
            put_value(self.database, transfer.IDENTITY, identity)
        self.blobs.claim(identity)

    def clear_blobs(self) -> None:
        clear_folders(self._folder)
        self.blobs.remove([name for area in IN_S3 for name in self.blobs.names(area)])

    def bound_cache(self, most_bytes: int) -> None:
        self._cache.bound(most_bytes)

    # --- copies

    def copy_run(self, to: Path) -> None:
        to.mkdir(mode=0o700, parents=True)
        for _ in transfer.copy_blobs(self.blobs, FolderBlobs(to), [STATE]):
            pass
        transfer.write_database(to / DATABASE_FILE, self.database, OF_THE_HOME)

    def set_aside(self, aside: Path, named: Callable[[Snapshot], Iterable[str]]) -> Snapshot:
        raise HomeMismatch(
            f"the state of this home is in {self.database.url} and {self._blobs_url}: back these up with their own tools "
            "(pg_dump, versions of the bucket), and the folders ca/ and privacy/ of the home"
        )
