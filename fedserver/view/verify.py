"""`fedserver verify`: compare every file of a server's home with its digest. Only reads, also beside a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from attune.common.errors import AttuneError
from attune.common.estimate import with_estimate
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.authority import Authority
from attune.fedserver.lab.recipe import StateRecipe, name_of
from attune.fedserver.ports.blobs import Blobs, Damaged, blob_of
from attune.fedserver.ports.ledger import LedgerReader, Snapshot
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.uploads import Uploads


def damages(home: ServerHome) -> Iterator[str]:
    """Yield a line for each thing that is damaged: authority, audit log, address, database, state, inbox, uploads."""
    storage = home.open()
    with contextlib.closing(storage.reader()) as reader:
        yield from _fault(lambda: _authority(home, reader))
        yield from _fault(lambda: list(reader.audit()))
        yield from _fault(home.address)
        try:
            reader.check()
            found = reader.snapshot()
        except AttuneError as error:
            yield str(error)
        else:
            yield from _state(home, storage.blobs, found)
    yield from Inbox(storage.blobs).damaged()
    yield from Uploads(storage).damaged()


def _fault(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except AttuneError as error:
        yield str(error)


def _authority(home: ServerHome, reader: LedgerReader) -> None:
    """Load the authority. A home that was never served over the network, as a simulation's, needs none."""
    if home.authority.exists() or reader.was_served():
        Authority.load(home.authority)


def _state(home: ServerHome, blobs: Blobs, found: Snapshot) -> Iterator[str]:
    """Check the slots, and what is kept to make them again."""
    closed = found.record.round
    recipe = StateRecipe.load(blobs, closed)
    if recipe is None and blobs.names(name_of(closed)):
        yield f"{home.path / name_of(closed)} is damaged: delete it, or close another round"
    for slot in with_estimate((*found.slots, *(recipe.replaced if recipe else ())), "files of the state verified"):
        try:
            blobs.check(blob_of(slot))
        except Damaged as damaged:
            yield str(damaged)
