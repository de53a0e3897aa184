"""The ledger in PostgreSQL: its schema, what it refuses, and a database that is lost and comes back."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import HomeMismatch, LedgerBusy, SettingError
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import Report, Slot
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.ports.ledger import Certificate, Token
from tests import engines

psycopg = pytest.importorskip("psycopg")

from attune.features.remote import postgres  # noqa: E402
from attune.features.remote.postgres import PostgresDatabase, check_url  # noqa: E402
from attune.features.remote.storage import PostgresLedger, PostgresReader, RemoteStorage  # noqa: E402

pytestmark = pytest.mark.engines


@pytest.fixture
def database() -> Iterator[PostgresDatabase]:
    made = PostgresDatabase(engines.postgres().new())
    made.prepare()
    yield made
    made.close()


def test_a_newer_schema_is_refused_in_one_line(database: PostgresDatabase) -> None:
    database.execute("INSERT INTO schema_version VALUES (99)")
    with pytest.raises(HomeMismatch, match=r"newer version of fedserver \(schema 99; this one knows 1\): update") as caught:
        database.prepare()
    assert "\n" not in str(caught.value)


def test_a_connection_is_used_again(database: PostgresDatabase) -> None:
    processes = [database.execute("SELECT pg_backend_pid()").fetchone() for _ in range(2)]
    with database.moment():
        processes.append(database.execute("SELECT pg_backend_pid()").fetchone())
    processes.append(database.execute("SELECT pg_backend_pid()").fetchone())
    assert len(set(processes)) == 1


def test_steps_of_the_schema_are_taken_once_and_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    database = PostgresDatabase(engines.postgres().new())
    monkeypatch.setattr(postgres, "_steps", lambda: [*STEPS, "CREATE TABLE more (x INTEGER); SELECT 1 / 0"])
    with closing(database):
        with pytest.raises(HomeMismatch, match="division by zero"):
            database.prepare()
        assert not database.exists(), "what the steps before had made is gone, too"
        monkeypatch.setattr(postgres, "_steps", lambda: STEPS)
        database.prepare()
        database.prepare()
        monkeypatch.setattr(postgres, "_steps", lambda: [*STEPS, "CREATE TABLE more (x INTEGER)"])
        database.prepare()
        assert database.execute("SELECT COUNT(*) FROM more").fetchone() == (0,)


STEPS = postgres._steps()


@pytest.mark.parametrize("name", ["fsync", "full_page_writes", "synchronous_commit"])
def test_a_database_that_may_lose_what_it_acknowledged_is_refused_by_name(name: str) -> None:
    engine = engines.postgres()
    engine.say(f"ALTER SYSTEM SET {name} = off")
    engine.say("SELECT pg_reload_conf()")
    try:
        with pytest.raises(SettingError, match=rf"has {name} = off: what it acknowledges may be lost. Set {name} = on there"):
            while True:  # it reads the change a moment later
                PostgresDatabase(engine.url()).prepare()
    finally:
        engine.say("ALTER SYSTEM RESET ALL")
        engine.say("SELECT pg_reload_conf()")
        engines.until(lambda: _reads(engine, name) == "on", "the setting does not come back")


def _reads(engine: engines.Postgres, name: str) -> str:
    with psycopg.connect(engine.url()) as db:
        return str(db.execute("SELECT current_setting(%s)", (name,)).fetchone()[0])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://eve:secret@host/db", "leave the password out"),
        ("postgresql://eve@host/db?password=secret", "leave the password out"),
        ("mysql://host/db", "postgresql://"),
        ("postgresql://host/db?nonsense=1", "cannot be read"),
    ],
)
def test_a_url_with_a_password_is_refused_and_not_repeated(url: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


async def test_a_row_that_was_changed_by_hand_is_named(database: PostgresDatabase) -> None:
    ledger = PostgresLedger(database)
    await ledger.enrol("kiel", "key", Certificate("f", "kiel", "device", 1e9), 1.5)
    await ledger.update_device("kiel", revoked=True, progress=0.1)
    await ledger.commit_round(
        Record(round=1), [Slot("p", "k", "f", "d", 1)], [Report(round=1, work="train", client="kiel")], {}
    )
    await ledger.note("made", "a test")
    with closing(PostgresReader(database.url)) as reader:
        reader.check()
    with psycopg.connect(database.url) as db:
        db.execute("UPDATE devices SET revoked = 0")
    with closing(PostgresReader(database.url)) as reader, pytest.raises(HomeMismatch, match=r"row of devices.*kiel"):
        reader.check()


async def test_text_that_postgresql_cannot_hold_does_not_stop_the_server(database: PostgresDatabase) -> None:
    ledger = PostgresLedger(database)
    await ledger.enrol("kiel", "key", Certificate("f", "kiel", "device", 1e9), 1.5)
    await ledger.update_device("kiel", note="a\0b")
    device = await ledger.device("kiel")
    assert device is not None
    assert device.note == "a\N{REPLACEMENT CHARACTER}b"


async def test_two_servers_change_one_after_the_other(database: PostgresDatabase) -> None:
    """Let two processes' worth of threads take uses of one token: none is lost."""
    ledgers = [PostgresLedger(PostgresDatabase(database.url)) for _ in range(2)]
    await ledgers[0].add_token(Token("t", b"pem", 100, 1e9, "operator"))

    async def enrol(ledger: PostgresLedger, which: int) -> None:
        for number in range(10):
            name = f"{which}-{number}"
            await ledger.enrol(name, name, Certificate(name, name, "device", 1e9), 1.0, "t")
            await ledger.note("enrolled", "a test", name=name)

    await asyncio.gather(*(enrol(ledger, which) for which, ledger in enumerate(ledgers)))
    token = await ledgers[0].token("t")
    assert token is not None and token.uses_left == 80
    with closing(PostgresReader(database.url)) as reader:
        assert len(list(reader.audit())) == 20
    for ledger in ledgers:
        await ledger.close()


@pytest.mark.parametrize("counts", [True, False])
async def test_a_connection_that_is_lost_in_a_commit_does_not_leave_a_doubt(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """Lose the answer to COMMIT once, after or before the database has carried it out."""
    lost: list[str] = []
    execute = psycopg.Connection.execute

    def losing(self, query, *arguments, **named):  # type: ignore[no-untyped-def]
        if query != "COMMIT" or lost:
            return execute(self, query, *arguments, **named)
        lost.append(query)
        if counts:
            execute(self, query)
        self.close()
        raise psycopg.OperationalError("the connection was lost")

    ledger = PostgresLedger(database)
    await ledger.put_record(Record(round=1))
    monkeypatch.setattr(psycopg.Connection, "execute", losing)
    if counts:
        await ledger.put_record(Record(round=2))
    else:
        with pytest.raises(LedgerBusy, match="lost"):
            await ledger.put_record(Record(round=2))
    assert (await ledger.snapshot()).record.round == (2 if counts else 1)
    assert lost


def test_a_process_that_stopped_within_a_transaction_holds_up_nobody_for_long(database: PostgresDatabase) -> None:
    other, begun, go_on = PostgresDatabase(database.url), threading.Event(), threading.Event()
    said: list[BaseException] = []

    def stop() -> None:
        try:
            with other.transaction():
                begun.set()
                go_on.wait(30)
                other.execute("INSERT INTO meta (key, value) VALUES ('late', '1')")
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    begun.wait()
    began = time.monotonic()
    database.execute("INSERT INTO meta (key, value) VALUES ('next', '1')")
    assert time.monotonic() - began < 6
    go_on.set()
    thread.join()
    assert [type(error) for error in said] == [LedgerBusy]
    assert database.execute("SELECT key FROM meta").fetchall() == [("next",)]
    other.close()


async def test_a_database_that_is_killed_and_comes_back_has_what_was_acknowledged(tmp_path: Path) -> None:
    """Kill -9 PostgreSQL while records are written: calls end with LedgerBusy at worst, and no acknowledged one is lost."""
    engine = engines.postgres()

    database = PostgresDatabase(engine.new())
    database.prepare()
    ledger, stopped, acknowledged = PostgresLedger(database), threading.Event(), 0

    def kill() -> None:
        for _ in range(2):
            time.sleep(0.3)
            engine.kill()
            engine.start()
        stopped.set()

    killer = threading.Thread(target=kill)
    killer.start()
    while not stopped.is_set():
        with suppress(LedgerBusy):
            await ledger.put_record(Record(round=acknowledged + 1))
            acknowledged += 1
            assert (await ledger.snapshot()).record.round == acknowledged
    killer.join()
    assert acknowledged > 3
    assert (await ledger.snapshot()).record.round in (acknowledged, acknowledged + 1)
    await ledger.close()


def test_a_server_leaves_a_connection_to_a_database_that_only_reads(database: PostgresDatabase) -> None:
    """Let new sessions only read, as those on a standby of PostgreSQL after a failover do, until the name leads elsewhere."""
    engine, put = engines.postgres(), "INSERT INTO meta VALUES (?, ?)"

    def only_read(on: str) -> None:
        with psycopg.connect(engine.url(), autocommit=True, options="-c default_transaction_read_only=off") as admin:
            admin.execute(f"ALTER DATABASE postgres SET default_transaction_read_only = {on}")

    database.execute(put, ("before", "1"))
    try:
        only_read("on")
        database.close()
        for _ in range(2):
            with pytest.raises(LedgerBusy, match=r"cannot be used now .*read-only transaction"):
                database.execute(put, ("meanwhile", "1"))
    finally:
        only_read("off")
    database.execute(put, ("after", "1"))
    assert {key for (key,) in database.execute("SELECT key FROM meta").fetchall()} == {"before", "after"}


def test_a_database_that_is_down_is_a_clear_line(tmp_path: Path) -> None:
    engines.postgres()
    with pytest.raises(
        LedgerBusy,
        match=rf"the database postgresql://eve@127.0.0.1:{(port := engines.free_port())}/x cannot be used now .*refused",
    ):
        PostgresDatabase(f"postgresql://eve@127.0.0.1:{port}/x").prepare()


@pytest.mark.parametrize("decision", ["revoke", "new_token", "revoke_token"])
def test_a_server_that_looks_within_a_decision_looks_again_after_it(
    database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decision: str
) -> None:
    """Look for news after each line of the audit log, which is written before what it is about."""
    storage, ledger, looks = RemoteStorage(tmp_path, database.url, "s3://bucket/prefix"), PostgresLedger(database), list[str]()
    admin, note = FederationAdmin(ledger, "operator"), ledger.note
    key = secrets.token_bytes(33)

    async def noted(*arguments: Any, **facts: Any) -> None:
        await note(*arguments, **facts)
        looks.append(storage.news())

    async def decide() -> None:
        await ledger.enrol("ada", "key", Certificate("print", "ada", "device", 1e12), 0.0)
        await admin.new_token(key)
        [token] = await ledger.tokens()
        looks.append(storage.news())
        monkeypatch.setattr(ledger, "note", noted)
        await getattr(admin, decision)({"revoke": "ada", "new_token": key, "revoke_token": token.id}[decision])

    with closing(storage.database):
        aio.run(decide())
        assert len(looks) > 1 and storage.news() not in looks
