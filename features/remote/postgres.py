"""A PostgreSQL database: its connections, its transactions, and its schema.

Each transaction that changes something takes one advisory lock, so that changes come one after the other, as in SQLite. A lost
connection is replaced. If it was lost during a commit, PostgreSQL is asked whether the transaction counts. Sessions end by
themselves where their process no longer answers (idle_in_transaction_session_timeout), so a stopped process holds up nobody.
"""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from attune.common.errors import HomeMismatch, LedgerBusy, ServerReplaced, SettingError
from attune.fedserver.stores.database import Rows, put_value, value_in

SILENT_S = 2.5  # a server that has not used its lock for so long loses it
CUT_OFF = f"it has not answered for {SILENT_S} s, so another server may have taken over"
WAIT_S = 10.0  # how long a call waits for a lost database, or for another process's transaction
LOOK_S = 0.1
TERM = "term"  # key of the table `meta`: the fencing number, one more with each server that takes over
MOST_CONNECTIONS = 8  # of one process, beside those of readers
OLDEST = 14  # of PostgreSQL
LOCKS = 0x61747475  # the first number of each advisory lock; the second is of the schema
TURN = "SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))"
MARK = "INSERT INTO commits VALUES (%s, %s) ON CONFLICT (who) DO UPDATE SET token = excluded.token"
CONNECTION: Mapping[str, Any] = {
    "autocommit": True, "application_name": "fedserver", "connect_timeout": 5, "keepalives_idle": 2, "keepalives_interval": 1,
    "keepalives_count": 3, "tcp_user_timeout": 5000,
}  # fmt: skip
SESSION = f"SET lock_timeout = '{WAIT_S}s'; SET idle_in_transaction_session_timeout = '3s'; SET attune.writer = 'on'"
TABLES = ("meta", "devices", "certificates", "tokens", "refusals", "slots", "metrics", "audit", "names")
PASSING = (
    psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.IdleInTransactionSessionTimeout,
)  # fmt: skip
DURABLE = ("fsync", "full_page_writes", "synchronous_commit")  # settings without which an acknowledged commit may be lost


@contextmanager
def errors(url: str) -> Iterator[None]:
    """Turn the database's errors into those of fedserver.

    Raises:
        LedgerBusy: The database is lost, or another process has it.
        HomeMismatch: The database is not what fedserver has made.
    """
    try:
        yield
    except PASSING as error:
        raise LedgerBusy(f"the database {url} cannot be used now ({_line(error)})") from error
    except psycopg.Error as error:
        raise HomeMismatch(f"the database {url} is not as fedserver has made it ({_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_url(url: str) -> None:
    """Check the URL of a ledger.

    Raises:
        SettingError: It is none, or has a password.
    """
    try:
        if not url.startswith(("postgresql://", "postgres://")):
            raise SettingError("--ledger needs a URL such as postgresql://USER@HOST/DATABASE")
        if "password" in conninfo_to_dict(url):
            raise SettingError("--ledger: leave the password out of the URL: use PGPASSWORD, or a password file (~/.pgpass)")
    except psycopg.ProgrammingError:
        raise SettingError("--ledger: this URL cannot be read; an example: postgresql://USER@HOST/DATABASE") from None


class WatchedConnection(psycopg.Connection[Any]):
    """Connection whose calls end when `given_up` says so, also on a network that is silent: else they would wait for ever."""

    given_up: Callable[[], bool]

    def wait(self, gen: Generator[Any, int, Any], *args: Any, **named: Any) -> Any:
        return super().wait(self._watched(gen), *args, **named)

    def _watched(self, calls: Generator[Any, int, Any]) -> Generator[Any, int, Any]:
        """Pass on what psycopg waits for; every tenth of a second it asks with 0, nothing is ready.

        Raises:
            OperationalError: The call is given up.
        """
        try:
            state = next(calls)
            while True:
                ready = yield state
                if not ready and getattr(self, "given_up", bool)():
                    raise psycopg.OperationalError("the database has not answered in time")
                state = calls.send(ready)
        except StopIteration as end:
            return end.value


class PostgresDatabase:
    """Implements tables.Database for several threads: each block has a connection of its own.

    Attributes:
        term: This server's fencing number, checked within each commit; None for a command, which may always write.
        when_replaced: Called when another server has begun a newer term, before anybody is told of it.
        mine_until: Moment (monotonic) from which on another server may serve, because this one has not used its lock.
    """

    strings: ClassVar[str] = "SELECT json_array_elements_text(?::json)"

    def __init__(self, url: str) -> None:
        self.url = url
        self.term: int | None = None
        self.when_replaced: Callable[[], None] = lambda: None
        self.mine_until = math.inf
        self._here = threading.local()
        self._process = secrets.token_hex(8)
        self._idle: deque[psycopg.Connection[Any]] = deque()
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def is_cut_off(self) -> bool:
        """Return whether another server may serve by now. Then no call waits, so that devices look for that server at once."""
        return time.monotonic() > self.mine_until

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        with errors(self.url), self._places:
            if self.is_cut_off():
                raise psycopg.OperationalError(CUT_OFF)
            connection = self._live()
            self._here.connection = connection
            try:
                yield connection
            except psycopg.errors.ReadOnlySqlTransaction:
                self.close()  # all lead to a standby of PostgreSQL; a new connection may lead to the server that writes
                connection.close()
                raise
            finally:
                self._here.connection = None
                if connection.info.transaction_status == TransactionStatus.IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _live(self) -> psycopg.Connection[Any]:
        """Return an idle connection that answers, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._new()
            with suppress(psycopg.OperationalError):
                connection.execute("SELECT 1")
                return connection
            connection.close()

    def _new(self, given_up: Callable[[], bool] | None = None) -> psycopg.Connection[Any]:
        """Return a new connection. A database that is down is waited for.

        Args:
            given_up: Function that says when no call on it waits any longer; None: when this server is cut off.
        """
        end, given_up = time.monotonic() + WAIT_S, given_up or self.is_cut_off
        while True:
            try:
                if given_up():
                    raise psycopg.OperationalError(CUT_OFF)
                connection = WatchedConnection.connect(self.url, **CONNECTION)
                connection.given_up = given_up
                connection.execute(SESSION)
                return connection
            except psycopg.OperationalError:
                if time.monotonic() > end or given_up():
                    raise
            time.sleep(LOOK_S)

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Rows:
        if (connection := getattr(self._here, "connection", None)) is not None:
            return connection.execute(_translated(statement), _plain(values))  # type: ignore[no-any-return]
        with self._connection() if statement.startswith("SELECT") else self.transaction():
            return self.execute(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._connection() as db:
            db.execute("BEGIN")
            try:
                db.execute(TURN, (LOCKS,))
                self._check_term()
                yield
                mark = (f"{self._process}-{threading.get_ident()}", secrets.token_hex(8))
                db.execute(MARK, mark)
            except BaseException:
                with suppress(psycopg.Error):
                    db.execute("ROLLBACK")
                raise
            try:
                db.execute("COMMIT")
            except psycopg.OperationalError:
                if not self._is_committed(*mark):
                    raise

    def _check_term(self) -> None:
        """Check that no other server has begun a newer term.

        Raises:
            ServerReplaced: One has. Nothing that this process does counts any more.
        """
        if self.term is not None and self.newest_term() != self.term:
            self.when_replaced()
            raise ServerReplaced(f"another server has taken over the federation in {self.url}")

    def newest_term(self) -> int:
        """Return the number of the newest term; 0 before the first."""
        return value_in(self, TERM, int) or 0

    def begin_term(self) -> None:
        """Begin a new term, the one of this process. From now on no other server can commit anything."""
        self.term = None
        with self.transaction():
            self.execute("DELETE FROM commits")
            term = self.newest_term() + 1
            put_value(self, TERM, term)
        self.term = term

    def _is_committed(self, who: str, token: str) -> bool:
        """Return whether a transaction counts, of which the connection was lost during the commit.

        The number of a transaction would not tell: after a crash PostgreSQL may give it to another one.
        """
        end = time.monotonic() + WAIT_S  # also of a server that is cut off: what it does next depends on this
        with closing(self._new(lambda: time.monotonic() > end)) as db, db.transaction():
            db.execute(TURN, (LOCKS,))  # from here on the lost one has ended
            return db.execute("SELECT 1 FROM commits WHERE who = %s AND token = %s", (who, token)).fetchone() is not None

    @contextmanager
    def moment(self) -> Iterator[None]:
        with self._connection() as db:
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                yield
            finally:
                with suppress(psycopg.Error):
                    db.execute("ROLLBACK")

    def synced(self) -> AbstractContextManager[None]:
        """No-op: every commit is durable, for `prepare` refuses a database of which that is not true."""
        return nullcontext()

    def settle(self) -> None:
        """No-op: PostgreSQL looks after its log."""

    def exists(self) -> bool:
        """Return whether a ledger is here."""
        return self.execute("SELECT to_regclass('schema_version')").fetchone()[0] is not None

    def prepare(self) -> None:
        """Check the database, and bring its schema to this version, in one transaction.

        Raises:
            SettingError: The database is too old, or does not make its commits durable.
            HomeMismatch: A newer version of fedserver wrote the schema.
            LedgerBusy: The database cannot be reached.
        """
        with errors(self.url), psycopg.connect(self.url, **CONNECTION) as db:
            self._check_durable(db)
        with self.transaction():
            db = self._here.connection
            if db.execute("SELECT to_regclass('schema_version')").fetchone()[0] is None:
                db.execute("CREATE TABLE schema_version (version INTEGER PRIMARY KEY)")
            [version] = db.execute("SELECT COALESCE(MAX(version), 0) FROM schema_version").fetchone()
            steps = _steps()
            if version > len(steps):
                raise HomeMismatch(
                    f"the database {self.url} was written by a newer version of fedserver (schema {version}; this one knows "
                    f"{len(steps)}): update fedserver"
                )
            for number, step in enumerate(steps[version:], version + 1):
                db.execute(step)
                db.execute("INSERT INTO schema_version VALUES (%s)", (number,))

    def _check_durable(self, db: psycopg.Connection[Any]) -> None:
        if db.info.server_version < OLDEST * 10000:
            raise SettingError(f"the database {self.url} is older than PostgreSQL {OLDEST}: update it")
        for name in DURABLE:
            [value] = db.execute("SELECT current_setting(%s)", (name,)).fetchone() or ("",)
            if value == "off":
                raise SettingError(
                    f"the database {self.url} has {name} = off: what it acknowledges may be lost. Set {name} = on there"
                )

    def changed(self) -> Iterator[str]:
        """Yield the table and the key of each row that has other content than was written."""
        for table in TABLES:
            rows = self.execute(
                f"SELECT LEFT((to_jsonb(t) - 'row_digest')::text, 60) FROM {table} t "  # noqa: S608 - names of the schema
                "WHERE row_digest IS DISTINCT FROM row_digest_of(to_jsonb(t))"
            )
            yield from (f"a row of {table}, {row[0]}" for row in rows)


@cache
def _steps() -> list[str]:
    """Return the steps from an empty database to this version's schema: the files `schema/NNNN.sql`."""
    folder = files("attune.features.remote") / "schema"
    return [path.read_text() for path in sorted(folder.iterdir(), key=lambda path: path.name) if path.name.endswith(".sql")]


@cache
def _translated(statement: str) -> bytes:
    """Return a statement with its parameters as psycopg marks them."""
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", statement).replace("?", "%s").encode()


def _plain(values: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any] | Mapping[str, Any]:
    """Return parameters as the tables keep them: truth as 0 or 1, and text without the character that PostgreSQL lacks."""
    if isinstance(values, Mapping):
        return {name: _kept(value) for name, value in values.items()}
    return [_kept(value) for value in values]


def _kept(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value
