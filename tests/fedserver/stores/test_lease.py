"""Several servers over one database: one of them serves, and a server that was replaced can commit nothing."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from attune.common import aio
from attune.common.errors import HomeBusy, LedgerBusy, ServerReplaced
from attune.fedserver.core.messages import Record
from benchmarks.rough import Proxy
from tests import engines

pytest.importorskip("psycopg")

from attune.features.remote import lease
from attune.features.remote.lease import Lease
from attune.features.remote.postgres import SILENT_S, PostgresDatabase
from attune.features.remote.storage import PostgresLedger, PostgresReader

pytestmark = pytest.mark.engines


@pytest.fixture
def servers() -> Iterator[list[PostgresDatabase]]:
    url = engines.postgres().new()
    made = [PostgresDatabase(url) for _ in range(2)]
    yield made
    for database in made:
        database.close()


def test_one_holds_it_and_the_next_begins_a_new_term(servers: list[PostgresDatabase]) -> None:
    first, second = servers
    with Lease(first).held(None):
        assert first.term == 1
        with pytest.raises(HomeBusy, match="a server already runs on the database"), Lease(second).held(None):
            pass
    with Lease(second).held(None):
        assert second.term == 2


def test_the_lock_is_free_as_soon_as_its_holder_has_ended(
    servers: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the session open, as PostgreSQL does until it notices that it was closed: a server that starts now gets the lock."""
    open_still = list[lease.WatchedConnection]()
    monkeypatch.setattr(lease.WatchedConnection, "close", lambda session: open_still.append(session))
    with Lease(servers[0]).held(None):
        pass
    with Lease(servers[1]).held(None):
        assert servers[1].term == 2
    monkeypatch.undo()
    for session in open_still:
        session.close()


def test_a_waiting_server_says_so_and_takes_over(servers: list[PostgresDatabase]) -> None:
    said, over = list[str](), threading.Event()

    def wait() -> None:
        with Lease(servers[1]).held(said.append):
            over.set()

    with Lease(servers[0]).held(None):
        thread = threading.Thread(target=wait)
        thread.start()
        engines.until(lambda: said, "the second to wait")
        assert not over.wait(0.5)
    assert over.wait(2.0)
    thread.join()
    assert set(said) == {lease.WAITS}


def test_a_holder_that_does_nothing_loses_it_and_commits_nothing_more(
    servers: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = servers
    with monkeypatch.context() as patch:
        patch.setattr(lease, "BEAT_S", 3600.0)  # as if it were stopped
        holder = Lease(old).held(None)
        holder.__enter__()
        time.sleep(0.2)  # its thread waits by now
    ended: list[int] = []
    monkeypatch.setattr(lease.os, "_exit", ended.append)
    ledger = PostgresLedger(old)
    aio.run(ledger.put_record(Record(round=1)))
    began = time.monotonic()
    with Lease(new).held(lambda text: None):
        assert time.monotonic() - began < 5.0
        aio.run(PostgresLedger(new).put_record(Record(round=2)))
        with pytest.raises(LedgerBusy, match="another server may have taken over"):
            aio.run(ledger.put_record(Record(round=3)))
        old.mine_until = math.inf  # as if its clock had stood still
        with pytest.raises(ServerReplaced, match="another server has taken over"):
            aio.run(ledger.put_record(Record(round=3)))
        with pytest.raises(ServerReplaced):
            aio.run(ledger.note("enrolled", "the old server", name="kiel"))
        aio.run(PostgresLedger(PostgresDatabase(old.url)).note("token made", "a command"))
        with closing(PostgresReader(new.url)) as reader:
            assert reader.snapshot().record.round == 2
            assert [entry.event for entry, _ in reader.audit()] == ["token made"]
    old.term = None


def test_whoever_finds_the_lock_taken_after_a_lost_session_ends(
    servers: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeat seed 1 of `make chaos-scale`: after a restart of PostgreSQL the other server was the first to take the lock."""
    ended: list[int] = []
    monkeypatch.setattr(lease.os, "_exit", ended.append)
    old = Lease(servers[0])
    with old.held(None):
        assert old._session is not None
        old._session.close()
        while True:
            try:
                with Lease(servers[1]).held(None):
                    engines.until(lambda: ended, "the old server to end")
                    break
            except HomeBusy:  # the session is still being closed, or the old server was first
                old._session.close() if old._session else None
    assert ended[0] == ServerReplaced.exit_code


def test_a_database_that_restarts_does_not_end_the_server(
    servers: list[PostgresDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(lease.os, "_exit", ended.append)
    with Lease(servers[0]).held(None):
        engines.postgres().kill()
        engines.postgres().start()
        time.sleep(3 * lease.BEAT_S)
        aio.run(PostgresLedger(servers[0]).put_record(Record(round=1)))
        with pytest.raises(HomeBusy), Lease(servers[1]).held(None):
            pass
    assert ended == []


def test_a_call_on_a_silent_network_ends_and_the_server_goes_on_when_it_speaks_again(servers: list[PostgresDatabase]) -> None:
    port = engines.postgres().port
    with closing(Proxy(port)) as way:
        database = PostgresDatabase(servers[0].url.replace(f":{port}/", f":{way.port}/"))
        with Lease(database).held(None):
            ledger = PostgresLedger(database)
            aio.run(ledger.put_record(Record(round=1)))
            way.silence(math.inf)
            began = time.monotonic()
            with pytest.raises(LedgerBusy, match="cannot be used now"):
                aio.run(ledger.put_record(Record(round=2)))
            assert time.monotonic() - began < 3 * SILENT_S and database.is_cut_off()
            way.silence(0.0)
            engines.until(lambda: not database.is_cut_off(), "the lock to be held again")
            aio.run(ledger.put_record(Record(round=3)))
            assert database.term == 1
        database.close()
