"""The ledger in one SQLite file, on a thread of its own: no caller waits on the event loop for a disk or for a lock.

One question is asked at every call of a peer: whose certificate is this? It is read at once, through a connection of its own
that waits for nobody (a reader needs no lock in SQLite's WAL mode); so it does not queue behind a commit that is being synced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from attune.common.errors import LedgerBusy
from attune.common.plan import Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import DeviceRecord, Report, Slot
from attune.fedserver.ports.ledger import Certificate, Refusal, Snapshot, Token
from attune.fedserver.stores.tables import Tables, certificate_in

T = TypeVar("T")
# What SQLite says of errors that pass when another process lets go, or when somebody makes room. Python 3.10 tells no codes.
PASSING = ("locked", "is full", "unable to open", "disk I/O error")


def passes(error: sqlite3.OperationalError) -> bool:
    return any(words in str(error) for words in PASSING)


class SqliteLedger:
    """Calls are carried out one after the other. Errors: LedgerBusy for what can pass; HomeMismatch for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._tables = Tables(path)
        self._reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0, check_same_thread=False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._path = path

    def __repr__(self) -> str:
        return f"SqliteLedger({self._path})"

    async def _do(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.OperationalError as error:
            if passes(error):
                raise LedgerBusy(f"the database of the federation cannot be used now ({error})") from error
            raise

    async def close(self) -> None:
        """SQLite folds the write-ahead log into the file when its last connection closes, unless that one only reads.

        So the reader of a damaged file, which `check` has used, goes last: the log is of the file that a backup brings back.
        """
        if not self._tables.damaged:
            self._reader.close()
        await self._do(self._tables.close)
        self._reader.close()
        self._thread.shutdown()

    async def check(self) -> None:
        await self._do(self._tables.check, self._reader)

    async def snapshot(self) -> Snapshot:
        return await self._do(self._tables.snapshot)

    async def set_overrides(self, overrides: Mapping[str, Any]) -> None:
        await self._do(self._tables.set_overrides, overrides)

    async def put_record(self, record: Record) -> None:
        await self._do(self._tables.put_record, record)

    async def commit_round(
        self,
        record: Record,
        slots: Iterable[Slot],
        rows: Iterable[Report],
        marks: Mapping[str, Mapping[str, int]],
        plan: Plan | None = None,
    ) -> None:
        await self._do(self._tables.commit_round, record, slots, rows, marks, plan)

    async def last_evaluations(self, before: int, but: int = 0) -> list[Report]:
        return await self._do(self._tables.last_evaluations, before, but)

    async def device(self, name: str) -> DeviceRecord | None:
        return await self._do(self._tables.device, name)

    async def devices(self, names: Collection[str] | None = None) -> list[DeviceRecord]:
        return await self._do(self._tables.devices, names)

    async def update_device(self, name: str, **fields: Any) -> None:
        await self._do(self._tables.update_device, name, fields)

    async def refuse(self, refusal: Refusal, keep: int) -> None:
        await self._do(self._tables.refuse, refusal, keep)

    async def disconnect_all(self, now: float) -> None:
        await self._do(self._tables.disconnect_all, now)

    async def enrol(self, name: str, public_key: str, certificate: Certificate, now: float, token: str | None = None) -> None:
        await self._do(self._tables.enrol, name, public_key, certificate, now, token)

    async def renew(self, certificate: Certificate, now: float, unused: int, forget_s: float) -> None:
        await self._do(self._tables.renew, certificate, now, unused, forget_s)

    async def first_use(self, fingerprint: str, now: float, retires_at: float) -> list[str]:
        return await self._do(self._tables.first_use, fingerprint, now, retires_at)

    async def certificates(self, name: str | None = None) -> list[Certificate]:
        return await self._do(self._tables.certificates, name)

    async def certificate(self, fingerprint: str) -> Certificate | None:
        try:
            return certificate_in(self._reader, fingerprint)
        except sqlite3.OperationalError:  # somebody recovers the file, or holds all of it
            return await self._do(self._tables.certificate, fingerprint)

    async def served(self) -> bool:
        return await self._do(self._tables.served)

    async def replace_operator(self, certificate: Certificate) -> None:
        await self._do(self._tables.replace_operator, certificate)

    async def add_token(self, token: Token, keep: int | None = None) -> None:
        await self._do(self._tables.add_token, token, keep)

    async def token(self, fingerprint: str) -> Token | None:
        return await self._do(self._tables.token, fingerprint)

    async def tokens(self) -> list[Token]:
        return await self._do(self._tables.tokens)

    async def withdraw(self, id: str, now: float) -> None:
        await self._do(self._tables.withdraw, id, now)

    async def bootstrap_roots(self, now: float, keep_s: float) -> list[bytes]:
        return await self._do(self._tables.bootstrap_roots, now, keep_s)
