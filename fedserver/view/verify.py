"""Holds every file of a server's home against what was written; reads only, also beside a running server. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from attune.common import aio
from attune.common.errors import AttuneError
from attune.common.estimate import told
from attune.fedserver.home import Home
from attune.fedserver.identity.authority import Authority
from attune.fedserver.lab.recipe import Recipe, name_of
from attune.fedserver.ports.blobs import Blobs, Damaged, blob_of
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.audit import entries
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.sqlite import SqliteLedger
from attune.fedserver.stores.uploads import Uploads


def damages(home: Home) -> Iterator[str]:
    """A line for each thing that is damaged: authority, audit log, database, state, inbox, uploads."""
    try:
        if home.authority.exists() or not aio.run(_simulated(home)):
            Authority.load(home.authority)
    except AttuneError as error:
        yield str(error)
    try:
        list(entries(home.audit.path))
    except AttuneError as error:
        yield str(error)
    try:
        home.address()
    except AttuneError as error:
        yield str(error)
    blobs = FolderBlobs(home.path)
    try:
        found = aio.run(_read(home))
    except AttuneError as error:
        yield str(error)
    else:
        yield from _state(home, blobs, found)
    yield from Inbox(blobs).damaged()
    yield from Uploads(blobs).damaged()


async def _simulated(home: Home) -> bool:
    """Whether no server has ever served this home over the network: every start of one installs an operator."""
    ledger = SqliteLedger(home.database)
    try:
        return not await ledger.served()
    finally:
        await ledger.close()


async def _read(home: Home) -> Snapshot:
    ledger = SqliteLedger(home.database)
    try:
        await ledger.check()
        return await ledger.snapshot()
    finally:
        await ledger.close()


def _state(home: Home, blobs: Blobs, found: Snapshot) -> Iterator[str]:
    """The slots, and what is kept to make them again."""
    closed = found.record.round
    recipe = Recipe.load(blobs, closed)
    if recipe is None and blobs.size(name_of(closed)) is not None:
        yield f"{home.path / name_of(closed)} is damaged: delete it, or close another round"
    for slot in told((*found.slots, *(recipe.replaced if recipe else ())), "files of the state verified"):
        try:
            blobs.check(blob_of(slot))
        except Damaged as damaged:
            yield str(damaged)
