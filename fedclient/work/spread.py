"""The worker whose devices' learners are in other processes: here is waited for them, and for several at one time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from attune.fedclient.work.processes.pool import Pool
from attune.fedclient.work.worker import Awake, Work, Worker

if TYPE_CHECKING:
    from attune.fedclient.messages import Result
    from attune.fedclient.work.processes.away import Away

EACH = 2  # devices that have a turn, for each process: one trains while the next one downloads


class Spread(Worker):
    """awake_bytes: what devices that wait may hold in memory, in all processes. stopped: whether all work is to be given up.

    bounded: whether devices take turns, so that what they download does not wait in memory.
    """

    def __init__(
        self, pool: Pool, awake_bytes: float, stopped: Callable[[], bool] = lambda: False, bounded: bool = True
    ) -> None:
        turns = EACH * len(pool.hosts)
        self.awake, self.make = Awake(awake_bytes), pool.make_learner
        self.turn = asyncio.Semaphore(turns) if bounded else contextlib.nullcontext()
        self._stopped = stopped
        self._thread = ThreadPoolExecutor(turns, thread_name_prefix="waiting")

    async def carry_out(self, work: Work) -> Result:
        """As Worker. Errors: Lost too."""
        thread, whole = cast("Away", work.learner).thread, replace(work, cancelled=lambda: self._stopped() or work.cancelled())
        return await asyncio.get_running_loop().run_in_executor(thread, whole.run)
