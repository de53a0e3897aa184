"""Start of a server whose state may be in PostgreSQL and S3. While another server has that storage, this process is a standby.

A standby answers monitors and its supervisor, and it ends when it is told to. Devices are not let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

from attune.common.config import ServerSettings
from attune.common.errors import HomeBusy, SettingError
from attune.common.supervisor import supervised
from attune.fedserver.home import ServedAddress, ServerHome
from attune.fedserver.ports.storage import HomeStorage
from attune.seams import NeverServed, page

LOG = logging.getLogger("fedserver")


@cache
def remote_storage(folder: Path, ledger: str, blobs: str) -> HomeStorage:
    """Answer the seam: one storage for each home in a process, because it has connections.

    Raises:
        SettingError: A URL cannot be, or a package is missing.
    """
    try:
        from attune.features.remote.storage import RemoteStorage
    except ImportError as error:
        raise SettingError(f"--ledger and --blobs need more packages ({error}): pip install 'attune-fl[server]'") from None
    return RemoteStorage(folder, ledger, blobs)


@contextlib.asynccontextmanager
async def only_server(
    home: ServerHome, address: ServedAddress, dashboard: str | None, say: Callable[[str], None], signalled: asyncio.Future[str]
) -> AsyncIterator[None]:
    """Hold the home and its storage during the block, as soon as no other server does.

    Args:
        home: The home.
        address: Where this process will serve devices.
        dashboard: Where it answers monitors, as for `page`.
        say: Gets each line for the operator.
        signalled: Gets the name of the signal that ends this process.

    Raises:
        NeverServed: A signal came while another server had the storage.
        HomeBusy: A server runs on the home itself.
    """
    loop, waits, given_up = asyncio.get_running_loop(), asyncio.Future[str](), threading.Event()

    def note(text: str) -> None:
        if not waits.done():
            waits.set_result(text)

    def wait(text: str) -> None:  # on a thread, at each look at the lock
        loop.call_soon_threadsafe(note, text)
        if given_up.is_set():
            raise HomeBusy(text)

    with contextlib.ExitStack() as held:
        taking = asyncio.create_task(asyncio.to_thread(held.enter_context, home.locked(wait)))
        try:
            await _first(taking, waits)
            if not taking.done():
                address.waits = waits.result()
                async with _standby(home, address, dashboard, say, address.waits):
                    await _first(taking, signalled)
        finally:
            given_up.set()
            await asyncio.wait({taking})
        if taking.exception() is not None and signalled.done():
            LOG.info("stopping: %s; this server has only waited", signalled.result())
            raise NeverServed
        taking.result()
        yield


async def _first(*ends: asyncio.Future[Any]) -> None:
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


@contextlib.asynccontextmanager
async def _standby(
    home: ServerHome, address: ServedAddress, dashboard: str | None, say: Callable[[str], None], waits: str
) -> AsyncIterator[None]:
    """Tell operator, supervisor and monitors during the block that this process is a standby."""
    home.write_address(address)
    server = home.snapshot().settings.server if home.exists() else ServerSettings()
    with page(home, dashboard, address, server, waits) as url:
        say(waits)
        if url is not None:
            say(f"dashboard {url}")
        async with supervised(lambda: f"standby: {waits}", ends=False):
            yield
