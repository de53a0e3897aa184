"""The right to serve a federation in PostgreSQL: one process holds a lock there, and the others wait for it.

The lock belongs to a session that the holder uses twice a second. PostgreSQL ends a session that was not used for some seconds
(idle_session_timeout), so a server that was killed, stopped or cut off loses the lock. The lock only says when to take over.
What keeps an old server from harm is the term: the new one begins a new term, and each commit compares it. A holder that could
not use the session for as long turns its devices away: another server may serve them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from attune.common.errors import HomeBusy, ServerReplaced
from attune.features.remote.postgres import CONNECTION, LOCKS, SILENT_S, TERM, PostgresDatabase, WatchedConnection, errors

LOG = logging.getLogger("fedserver")
BEAT_S, LOOK_S = 0.5, 0.2
LOCK = "SELECT pg_try_advisory_lock(%s, hashtext(current_schema()))"
WAITS = "another server serves this federation; this one takes over when it ends"


class Lease:
    """The lock of one process on one federation."""

    def __init__(self, db: PostgresDatabase) -> None:
        self._db = db
        self._session: WatchedConnection | None = None
        self._is_held, self._due = False, 0.0  # the moment until which the present call on the session may last
        self._ended = threading.Event()

    @contextmanager
    def held(self, waits: Callable[[str], None] | None) -> Iterator[None]:
        """Hold the lock in a new term during the block. When another server takes over, the process ends at once.

        Args:
            waits: Function that is told, at each look, that this process waits for another one. An error of it ends the
                waiting. None: this process does not wait.

        Raises:
            HomeBusy: Another process has the lock.
            LedgerBusy: The database cannot be reached.
        """
        with errors(self._db.url):
            is_mine = self._take()
        if not is_mine:
            if waits is None:
                self._close()
                raise HomeBusy(f"a server already runs on the database {self._db.url}: stop it first")
            self._wait(waits)
        beats = threading.Thread(target=self._beat, name="lease", daemon=True)
        try:
            self._db.prepare()
            self._db.begin_term()
            self._db.mine_until = time.monotonic() + SILENT_S
            self._renew()
            self._db.when_replaced = _end  # no device may hear of a step that has failed only here
            beats.start()
            yield
        finally:
            self._ended.set()
            if beats.ident is not None:
                beats.join()
            self._release()
            self._db.term, self._db.mine_until = None, math.inf

    def _take(self) -> bool:
        """Try to take the lock, in a new session if there is none; return whether it is held."""
        if self._session is None:
            session = WatchedConnection.connect(self._db.url, **CONNECTION)
            session.given_up = lambda: time.monotonic() > self._due
            self._session = session
            self._ask(f"SET idle_session_timeout = '{SILENT_S}s'")
        self._is_held = bool(self._ask(LOCK, LOCKS + 1).fetchone()[0])
        return self._is_held

    def _ask(self, statement: str, *values: object) -> Any:
        """Run a statement in the session. A silent network is given up.

        Raises:
            OperationalError: The session is lost.
        """
        self._due = time.monotonic() + SILENT_S
        if self._session is None:
            raise psycopg.OperationalError("the session is lost")
        return self._session.execute(statement.encode(), values)

    def _wait(self, waits: Callable[[str], None]) -> None:
        """Take the lock as soon as it is free. A database that is lost meanwhile is waited for."""
        try:
            while not self._is_held:
                waits(WAITS)
                time.sleep(LOOK_S)
                try:
                    self._take()
                except psycopg.OperationalError:
                    self._close()
        except BaseException:
            self._close()
            raise

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._renew()

    def _renew(self) -> None:
        """Use the session. If it was lost, take the lock again and go on, unless somebody has begun another term."""
        began = time.monotonic()
        try:
            if self._session is not None and self._is_held:
                self._ask("SELECT 1")
            else:  # another server may have it by now
                self._take()
                self._check()
        except psycopg.Error:
            self._close()
        else:
            if self._is_held:
                self._db.mine_until = began + SILENT_S

    def _check(self) -> None:
        row = self._ask("SELECT value FROM meta WHERE key = %s", TERM).fetchone()
        if row is None or int(row[0]) != self._db.term:
            _end()

    def _release(self) -> None:
        """Give the lock up at once: PostgreSQL frees it only when it notices that the session has ended."""
        if self._is_held:
            with suppress(psycopg.Error):
                self._ask("SELECT pg_advisory_unlock_all()")
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            with suppress(psycopg.Error):
                self._session.close()
            self._session, self._is_held = None, False


def _end() -> None:
    """End this process at once: no step that is under way may go on."""
    LOG.error("another server has taken over: this one ends; what it has acknowledged is kept")
    logging.shutdown()
    os._exit(ServerReplaced.exit_code)
