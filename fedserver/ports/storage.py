"""Port of the storage of one federation. Another kind of store is an implementation of it."""

from __future__ import annotations

from typing import Protocol

from attune.fedserver.ports.blobs import Blobs, Spool
from attune.fedserver.ports.ledger import Ledger, LedgerReader


class Storage(Protocol):
    """The ledger, the blobs and the spool of one federation. Each is opened when it is first asked for."""

    @property
    def ledger(self) -> Ledger:
        """The ledger, for the server and for commands that change something."""

    @property
    def blobs(self) -> Blobs:
        """The blobs of state, accepted updates, and what is served."""

    @property
    def spool(self) -> Spool:
        """The uploads that are on their way in."""

    def reader(self) -> LedgerReader:
        """Return a new reader of the ledger, which the caller closes.

        Raises:
            LedgerBusy: The ledger cannot be read now.
            HomeMismatch: The ledger is damaged.
        """

    async def close(self) -> None:
        """Close the ledger, if it is open."""
