"""The storage of one federation in PostgreSQL and S3, with a folder for what belongs to one process or one machine."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from typing_extensions import Self

from attune.fedserver.stores import postgres, s3
from attune.fedserver.stores.folder import FolderBlobs, FolderSpool
from attune.fedserver.stores.postgres import PostgresDatabase
from attune.fedserver.stores.postgres_ledger import PostgresLedger, PostgresReader
from attune.fedserver.stores.s3 import ObjectCache, S3Blobs, S3Objects

IDENTITY = "storage"  # key of the table `meta`: the text that marks this federation's prefix in S3


class RemoteStorage:
    """A server's storage in PostgreSQL and S3. See ports.storage.Storage. Leaving it as a context manager closes it.

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
    def blobs(self) -> S3Blobs:
        self.database.prepare()
        objects = S3Objects(self._blobs_url)
        return S3Blobs(self._local, self.database, objects, ObjectCache(self._folder / "cache", objects))

    @cached_property
    def spool(self) -> FolderSpool:
        """The uploads, on this machine's disk. A sealed one is known to the blobs."""
        return FolderSpool(self._local)

    def reader(self) -> PostgresReader:
        return PostgresReader(self.database.url)

    async def close(self) -> None:
        if "ledger" in self.__dict__:
            await self.ledger.close()
        self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
