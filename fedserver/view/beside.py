"""Looks at a server's home, beside the server that may be running on it: reads only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from attune.common import aio
from attune.fedserver.home import Home
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.sqlite import SqliteLedger
from attune.fedserver.view.status import status


def snapshot(home: Home) -> Snapshot:
    """What the ledger holds now. Errors: HomeMismatch if there is none, or it is damaged; LedgerBusy."""
    home.require()

    async def read() -> Snapshot:
        ledger = SqliteLedger(home.database)
        try:
            return await ledger.snapshot()
        finally:
            await ledger.close()

    return aio.run(read())


def status_of(home: Home, troubles: Sequence[str] = ()) -> dict[str, Any]:
    """The object of `fedserver status --json`; troubles: what the running server says of itself. Errors: as `snapshot`."""
    found = snapshot(home)
    address = home.address() if home.is_served() else None
    reported = Inbox(FolderBlobs(home.path)).names(*found.record.open_orders)
    return status(found, reported, f"{address.host}:{address.port}" if address else None, troubles, time.time())
