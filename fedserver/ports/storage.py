"""Port of the storage of one federation. Another kind of store is an implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from typing_extensions import Self

from attune.fedserver.ports.blobs import Blobs, Spool
from attune.fedserver.ports.ledger import Ledger, LedgerReader, Snapshot


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

    def news(self) -> str | None:
        """Return a text that differs after each revocation and with each join token; None where no other machine makes any.

        Raises:
            LedgerBusy: The ledger cannot be read now.
        """

    async def close(self) -> None:
        """Close the ledger, if it is open."""


class HomeStorage(Storage, Protocol):
    """Storage of a home, which outlives a process. Leaving it as a context manager closes it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def alone(self, waits: Callable[[str], None] | None) -> AbstractContextManager[None]:
        """Hold this storage for this server alone during the block, whatever other machines there are.

        Args:
            waits: Function that is told, at each look, that this process waits for another one. An error of it ends the
                waiting. None: this process does not wait.

        Raises:
            HomeBusy: Another server has it.
        """

    def exists(self) -> bool:
        """Return whether there is a ledger."""

    def check(self, authority: Path) -> None:
        """Check that nothing of the storage is missing.

        Args:
            authority: The certificate of the federation's authority.

        Raises:
            HomeMismatch: Something of a federation is here, but not all that it needs.
        """

    def check_ledger(self) -> None:
        """Read the whole ledger, if there is one, before anything writes to it.

        Raises:
            HomeMismatch: The ledger is damaged.
        """

    def create(self) -> None:
        """Make what a server needs, and empty what is served."""

    def bound_cache(self, most_bytes: int) -> None:
        """Keep at most so many bytes of copies of blobs on this disk, where the blobs themselves are elsewhere."""

    def clear_blobs(self) -> None:
        """Remove all blobs."""

    def copy_run(self, to: Path) -> None:
        """Copy the ledger and the state into the new folder `to`, durably, without what belongs to the home."""

    def set_aside(self, aside: Path, named: Callable[[Snapshot], Iterable[str]]) -> Snapshot:
        """Copy the ledger and link the blobs of one moment into the new folder `aside`; return what the ledger holds.

        Args:
            aside: The folder, on the same file system.
            named: Function that returns the names of the blobs of a snapshot's state.

        Raises:
            FileNotFoundError: A round was committed meanwhile, so a blob is gone: try again with another folder.
            HomeMismatch: Such a storage is copied by tools of its own.
        """
