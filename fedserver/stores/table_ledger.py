"""The common part of the ledgers that are tables of a database: calls wait on a thread, and not in the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from attune.fedserver.stores.tables import Tables

T = TypeVar("T")
P = ParamSpec("P")


class TableLedger(ABC):
    """A ledger whose tables are in a database. Calls are carried out one after the other."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    @abstractmethod
    def _errors(self) -> AbstractContextManager[Any]:
        """Turn errors of the database that pass into LedgerBusy."""

    async def _do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        with self._errors():
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))

    async def close(self) -> None:
        await self._do(self._tables.close)
        self._thread.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Return the tables' method of this name as a call that waits on the ledger's thread."""
        return partial(self._do, getattr(self._tables, name))
