"""Work whose caller is gone: what it ends with is no noise in the log."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from attune.common.errors import LedgerBusy
from attune.fedserver.federation.steps import Turns


async def test_a_lost_database_after_the_caller_is_gone_is_no_noise() -> None:
    """Repeat seed 15 of `make chaos-scale`: a device hung up while its update waited for the database."""
    noise: list[dict[str, Any]] = []

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    turns, lost = Turns(), asyncio.Event()

    async def work() -> None:
        await lost.wait()
        raise LedgerBusy("the database cannot be used now")

    caller = asyncio.create_task(turns.carry(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    lost.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert noise == []
