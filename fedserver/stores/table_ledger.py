"""The common part of the ledgers that are tables of a database: calls wait on a thread, and not in the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from attune.fedserver.stores.tables import Tables

T = TypeVar("T")
P = ParamSpec("P")


def _awaited(method: Callable[Concatenate[Tables, P], T]) -> Callable[Concatenate[TableLedger, P], Coroutine[Any, Any, T]]:
    """Return a method of TableLedger that calls this method of its tables on the ledger's thread."""

    @wraps(method)
    async def call(self: TableLedger, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._do(getattr(self._tables, method.__name__), *arguments, **named)

    return call


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

    tried = _awaited(Tables.tried)
    snapshot = _awaited(Tables.snapshot)
    set_audit_head = _awaited(Tables.set_audit_head)
    set_overrides = _awaited(Tables.set_overrides)
    put_record = _awaited(Tables.put_record)
    commit_round = _awaited(Tables.commit_round)
    last_evaluations = _awaited(Tables.last_evaluations)
    begin_run = _awaited(Tables.begin_run)
    end_run = _awaited(Tables.end_run)
    note_variants = _awaited(Tables.note_variants)
    note_tags = _awaited(Tables.note_tags)
    tags = _awaited(Tables.tags)
    end_cleanup = _awaited(Tables.end_cleanup)
    set_race = _awaited(Tables.set_race)
    set_commitments = _awaited(Tables.set_commitments)
    device = _awaited(Tables.device)
    devices = _awaited(Tables.devices)
    is_revoked_key = _awaited(Tables.is_revoked_key)
    update_device = _awaited(Tables.update_device)
    refuse = _awaited(Tables.refuse)
    disconnect_all = _awaited(Tables.disconnect_all)
    enrol = _awaited(Tables.enrol)
    release = _awaited(Tables.release)
    renew = _awaited(Tables.renew)
    first_use = _awaited(Tables.first_use)
    certificates = _awaited(Tables.certificates)
    replace_operator = _awaited(Tables.replace_operator)
    add_token = _awaited(Tables.add_token)
    token = _awaited(Tables.token)
    tokens = _awaited(Tables.tokens)
    withdraw = _awaited(Tables.withdraw)
    bootstrap_roots = _awaited(Tables.bootstrap_roots)
