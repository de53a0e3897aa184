"""Requirements of every ledger, in memory and on disk, and of the one on disk alone."""

import asyncio
import resource
import shutil
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from attune.common import aio
from attune.common.config import TrainSettings
from attune.common.errors import HomeMismatch, LedgerBusy
from attune.common.plan import ModelSpec, Plan
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord, Report, Slot
from attune.fedserver.ports.ledger import Certificate, Ledger, LedgerReader, Refusal, Token
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores import sqlite
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.sqlite import SqliteLedger, SqliteReader, passes
from attune.simulation.memory import MemoryStorage
from tests import engines

PLAN = Plan("f", 0, ModelSpec("mlr", "tabular", (2,), 2), [0, 1], "fedavg", {}, TrainSettings())
T = TypeVar("T")
Scenario = Callable[[Ledger], Awaitable[None]]


@pytest.fixture(params=["memory", "disk", pytest.param("postgres", marks=pytest.mark.engines)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    made: Storage
    match request.param:
        case "memory":
            made = MemoryStorage()
        case "disk":
            made = DiskStorage(tmp_path)
        case _:
            made = engines.remote_storage(tmp_path)
    yield made
    aio.run(made.close())


@pytest.fixture
def ledger(storage: Storage) -> Ledger:
    return storage.ledger


def run(ledger: Ledger, scenario: Scenario) -> None:
    aio.run(scenario(ledger))


def read(storage: Storage, look: Callable[[LedgerReader], T]) -> T:
    with closing(storage.reader()) as reader:
        return look(reader)


def certificate(fingerprint: str, name: str, **more: Any) -> Certificate:
    return Certificate(fingerprint, name, more.pop("role", "device"), 1e9, **more)


def token(fingerprint: str, uses: int = 1, expires_at: float = 100.0, origin: str = "operator") -> Token:
    return Token(fingerprint, f"pem of {fingerprint}".encode(), uses, expires_at, origin)


async def test_a_new_ledger_is_empty(ledger: Ledger) -> None:
    found = await ledger.snapshot()
    assert (found.overrides, found.plan, found.record) == (None, None, Record())
    assert (found.devices, found.slots, found.rows) == ((), (), ())
    assert await ledger.device("a") is await ledger.certificate("f") is await ledger.token("t") is None


async def test_settings_record_and_commitments_come_back(ledger: Ledger) -> None:
    record = Record(phase=Phase.TRAINING, round=3, devices=("a", "b"), cohort=("a",))
    overrides = {"round": {"rounds": 4}, "seed": 1}
    await ledger.put_record(record)
    await ledger.set_overrides(overrides)
    overrides["seed"] = 2
    assert (await ledger.snapshot()).commitments == {}
    await ledger.set_commitments({"authority": "f" * 64})
    await ledger.begin_run("second", overrides | {"seed": 1})
    await ledger.put_record(record)
    found = await ledger.snapshot()
    assert found.commitments == {"authority": "f" * 64}, "they are of all runs"
    assert (found.record, found.overrides) == (record, {"round": {"rounds": 4}, "seed": 1})


async def test_who_enrols_before_the_first_round_is_closed_is_a_founder(ledger: Ledger) -> None:
    await ledger.enrol("b", "key b", certificate("fb", "b"), now=5.0)
    await ledger.put_record(Record(round=1))
    await ledger.enrol("a", "key a", certificate("fa", "a"), now=6.0)
    await ledger.enrol("b", "another key", certificate("fb2", "b"), now=7.0)
    assert await ledger.devices() == [
        DeviceRecord("a", "key a", enrolled_at=6.0, founder=False),
        DeviceRecord("b", "another key", enrolled_at=5.0, founder=True),
    ]
    assert await ledger.certificate("fb") == certificate("fb", "b")
    assert [device.name for device in await ledger.devices(["b", "nobody"])] == ["b"]
    assert await ledger.devices([]) == []


async def test_the_key_of_a_revoked_device_is_known_and_that_of_others_is_not(ledger: Ledger) -> None:
    for name in ("a", "b"):
        await ledger.enrol(name, f"key {name}", certificate(f"f{name}", name), now=1.0)
    assert not await ledger.is_revoked_key("key a")
    await ledger.update_device("a", revoked=True)
    assert [await ledger.is_revoked_key(f"key {name}") for name in ("a", "b", "c")] == [True, False, False]


async def test_what_is_known_of_a_device_changes_field_by_field(ledger: Ledger) -> None:
    await ledger.enrol("a", "key", certificate("f", "a"), now=0.0)
    await ledger.update_device("a", connected=True, since=3.0, samples=7, note="no memory", progress=0.5, labels="0, 1")
    await ledger.update_device("nobody", connected=True)
    expected = DeviceRecord("a", "key", 0.0, True, False, True, 3.0, 7, 0, -1, 0.5, "no memory", "0, 1")
    assert await ledger.devices() == [expected]
    await ledger.disconnect_all(9.0)
    await ledger.disconnect_all(11.0)
    assert await ledger.device("a") == msgspec.structs.replace(expected, connected=False, since=9.0)


async def test_revoking_a_device_revokes_its_certificates_and_nobody_elses(ledger: Ledger) -> None:
    for name in ("a", "b"):
        await ledger.enrol(name, name, certificate(f"f{name}", name), now=0.0)
    await ledger.replace_operator(certificate("o1", "a", role="operator"))
    await ledger.update_device("a", revoked=True)
    revoked = [(await ledger.certificate(f)).revoked for f in ("fa", "fb", "o1")]  # type: ignore[union-attr]
    assert revoked == [True, False, False], "an operator may be called like a device"
    await ledger.replace_operator(certificate("o2", "operator", role="operator"))
    assert await ledger.certificate("o1") is None
    assert await ledger.certificate("o2") == certificate("o2", "operator", role="operator")


async def test_a_token_is_used_with_the_device_that_it_buys(ledger: Ledger) -> None:
    await ledger.add_token(token("t", uses=2))
    await ledger.enrol("a", "key a", certificate("fa", "a"), now=1.0, token="t")
    await ledger.enrol("a", "key a", certificate("fa2", "a"), now=2.0)
    assert await ledger.token("t") == token("t", uses=1)
    await ledger.enrol("b", "key b", certificate("fb", "b"), now=3.0, token="t")
    used = await ledger.token("t")
    assert used is not None and (used.uses_left, used.used_up_at) == (0, 3.0)


async def test_a_device_remembers_its_token_and_a_withdrawn_token_says_so(ledger: Ledger) -> None:
    await ledger.add_token(Token("t", b"pem", 5, 100.0, "operator", id="t1", uses=5, made_at=1.0, only_for="x"))
    await ledger.enrol("a", "key a", certificate("fa", "a"), now=1.0, token="t")
    await ledger.enrol("a", "key a", certificate("fa2", "a"), now=2.0)
    assert [device.token for device in await ledger.devices()] == ["t1"]
    await ledger.withdraw("t1", 7.0)
    await ledger.withdraw("t1", 9.0)
    expected = Token("t", b"pem", 4, 100.0, "operator", 7.0, "t1", 5, 1.0, "x", 7.0)
    assert await ledger.tokens() == [expected]
    assert await ledger.bootstrap_roots(8.0, 0.0) == []


async def test_a_renewed_certificate_retires_the_older_ones_when_it_is_first_used(ledger: Ledger) -> None:
    await ledger.enrol("a", "key 1", certificate("f1", "a", issued_at=1.0, public_key="key 1"), now=1.0)
    assert await ledger.first_use("f1", 2.0, 12.0) == []
    for number in (2, 3, 4):
        made = certificate(f"f{number}", "a", issued_at=float(number), public_key=f"key {number}")
        await ledger.renew(made, float(number), unused=2, forget_s=100.0)
    known = {each.fingerprint: each for each in await ledger.certificates("a")}
    assert list(known) == ["f1", "f3", "f4"], "of those that were never used the newest two"
    assert [each.retires_at for each in known.values()] == [None] * 3
    assert (await ledger.devices())[0].public_key == "key 1"
    assert sorted(await ledger.first_use("f3", 20.0, 30.0)) == ["f1"]
    assert (await ledger.devices())[0].public_key == "key 3"
    retires = {each.fingerprint: each.retires_at for each in await ledger.certificates()}
    assert retires == {"f1": 30.0, "f3": None, "f4": None}
    await ledger.renew(certificate("f5", "a", issued_at=200.0), 200.0, unused=2, forget_s=100.0)
    assert [each.fingerprint for each in await ledger.certificates("a")] == ["f3", "f4", "f5"]
    assert await ledger.first_use("nobody's", 1.0, 2.0) == []


async def test_of_an_origin_the_newest_tokens_stay(ledger: Ledger) -> None:
    for number in range(4):
        await ledger.add_token(token(f"s{number}", origin="start"), keep=2)
        await ledger.add_token(token(f"o{number}"))
    left = [name for name in ("s0", "s1", "s2", "s3", "o0", "o3") if await ledger.token(name) is not None]
    assert left == ["s2", "s3", "o0", "o3"]


async def test_spent_tokens_are_let_into_the_handshake_for_a_while(ledger: Ledger) -> None:
    await ledger.add_token(token("b", expires_at=50.0))
    await ledger.add_token(token("a", expires_at=1000.0))
    await ledger.enrol("x", "x", certificate("fx", "x"), now=20.0, token="a")
    assert await ledger.bootstrap_roots(40.0, 0.0) == [b"pem of b"]
    assert await ledger.bootstrap_roots(40.0, 30.0) == [b"pem of a", b"pem of b"]
    assert await ledger.bootstrap_roots(90.0, 30.0) == []


async def test_a_round_is_committed_whole(ledger: Ledger) -> None:
    slots = [Slot(part, key, f"{part}.{key}.1", "d", 8) for part, key in (("shared", "value"), ("attended", "b"))]
    rows = [
        Report(round=2, work="train", client="a", loss=0.5),
        Report(round=1, work="evaluate", client="a", accuracy_before=0.25, kept="common"),
        Report(round=1, work="train", client="b", samples=3),
        Report(round=1, work="train", client="a"),
    ]

    await ledger.enrol("a", "key", certificate("f", "a"), now=0.0)
    marks = {"a": {"contributed": 1, "fetched": 0}, "nobody": {"fetched": 0}}
    await ledger.commit_round(Record(round=1), slots, rows, marks, PLAN)
    found = await ledger.snapshot()
    assert (found.record, found.plan, found.slots) == (Record(round=1), PLAN, (slots[1], slots[0]))
    assert found.rows == (rows[3], rows[2], rows[1], rows[0])
    assert [(device.contributed, device.fetched) for device in found.devices] == [(1, 0)]
    newer = Slot("shared", "value", "shared.value.2", "e", 9)
    await ledger.commit_round(Record(round=2), [newer], [rows[0]], {})
    found = await ledger.snapshot()
    assert (found.plan, found.slots, len(found.rows)) == (PLAN, (slots[1], newer), 4)


async def test_last_evaluations_are_of_earlier_rounds_and_devices_not_revoked(ledger: Ledger) -> None:
    for name in ("a", "b", "c"):
        await ledger.enrol(name, "key", certificate(f"of {name}", name), 0.0)
    said = [(4, "a"), (4, "b"), (4, "c"), (3, "b"), (3, "a"), (2, "c"), (2, "a"), (2, "b")]
    rows = [Report(round=number, work="evaluate", client=name, likelihood_common=-1.5 * number) for number, name in said]
    await ledger.commit_round(Record(round=4), [], [*rows, Report(round=3, work="train", client="a")], {})
    await ledger.update_device("b", revoked=True)
    found = await ledger.last_evaluations(4)
    assert [(row.round, row.client, row.likelihood_common) for row in found] == [(3, "a", -4.5), (2, "c", -3.0)]
    assert await ledger.last_evaluations(0) == []
    assert [(row.round, row.client) for row in await ledger.last_evaluations(4, but=range(3, 4))] == [(2, "a"), (2, "c")]


async def test_a_commit_that_fails_leaves_everything_as_it_was(ledger: Ledger) -> None:
    def broken() -> Iterator[Report]:
        yield Report(round=1, work="train", client="a")
        raise ZeroDivisionError

    await ledger.enrol("a", "key", certificate("f", "a"), now=0.0)
    before = await ledger.snapshot()
    with pytest.raises(ZeroDivisionError):
        await ledger.commit_round(Record(round=1), [Slot("p", "k", "f", "d", 1)], broken(), {"a": {"contributed": 1}}, PLAN)
    assert await ledger.snapshot() == before


def test_a_reader_sees_what_was_written_and_only_the_rows_asked_for(storage: Storage) -> None:
    slot, rows = (
        Slot("shared", "value", "file", "d", 8),
        [Report(round=number, work="train", client="a") for number in (1, 2, 3)],
    )

    async def scenario(ledger: Ledger) -> None:
        await ledger.enrol("a", "key", certificate("f", "a"), now=0.0)
        await ledger.commit_round(Record(round=3), [slot], rows, {"a": {"contributed": 3}}, PLAN)
        await ledger.refuse(Refusal("eve", "bad-token", "no", 5.0), keep=3)
        assert read(storage, lambda reader: reader.snapshot()) == await ledger.snapshot()

    run(storage.ledger, scenario)
    found = read(storage, lambda reader: reader.snapshot(2))
    assert (found.rows, found.certificate_ends) == (tuple(rows[1:]), {"a": 1e9})
    read(storage, lambda reader: reader.check())


def test_a_reader_goes_on_while_the_ledger_is_written(storage: Storage) -> None:
    run(storage.ledger, lambda ledger: ledger.put_record(Record(round=1)))
    with closing(storage.reader()) as reader:
        assert reader.snapshot().record.round == 1
        run(storage.ledger, lambda ledger: ledger.put_record(Record(round=2)))
        assert reader.snapshot().record.round == 2


def test_an_operators_certificate_shows_that_a_server_has_served_it(storage: Storage) -> None:
    run(storage.ledger, lambda ledger: ledger.enrol("a", "key", certificate("f", "a"), now=0.0))
    assert not read(storage, lambda reader: reader.was_served())
    run(storage.ledger, lambda ledger: ledger.replace_operator(certificate("o", "operator", role="operator")))
    assert read(storage, lambda reader: reader.was_served())


def test_the_audit_log_has_every_note_chained_by_digests(storage: Storage) -> None:
    assert read(storage, lambda reader: list(reader.audit())) == []

    async def scenario(ledger: Ledger) -> None:
        await ledger.note("token made", "operator eve", id="1f", uses=2)
        await ledger.note("enrolled", "device", name="ada")

    run(storage.ledger, scenario)
    (first, digest), (second, _) = read(storage, lambda reader: list(reader.audit()))
    assert (first.number, first.event, first.by, first.facts) == (1, "token made", "operator eve", {"id": "1f", "uses": 2})
    assert (second.number, second.event, second.previous) == (2, "enrolled", digest)


def test_the_next_run_has_the_members_and_nothing_of_the_run_before(storage: Storage) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add_token(Token("t", b"pem", 5, 100.0, "operator", id="t1", uses=5))
        await ledger.enrol("a", "key", certificate("f", "a"), now=1.0, token="t")
        await ledger.put_record(Record(round=1))
        await ledger.enrol("b", "key", certificate("g", "b"), now=2.0)
        await ledger.update_device("b", revoked=True, connected=True, samples=7, note="odd", since=3.0)
        slot, row = Slot("shared", "value", "file", "d", 8), Report(round=2, work="train", client="a")
        await ledger.commit_round(Record(round=2), [slot], [row], {"a": {"contributed": 2}}, PLAN)
        await ledger.refuse(Refusal("eve", "bad-token", "no", 5.0), keep=3)
        await ledger.note_variants({"a": "small", "b": ""})
        await ledger.note_variants({"b%": "large"})
        await ledger.note_tags({"device a": "ward", "token t1": "icu"})
        await ledger.note_tags({"device a": ""})
        await ledger.end_run(Record(phase=Phase.DONE, round=2), {"round": {"rounds": 2}})
        ended = await ledger.snapshot()
        assert ended.variants == {"a": "small", "b": "", "b%": "large"}
        assert (ended.record.phase, ended.overrides) == (Phase.DONE, {"round": {"rounds": 2}})
        await ledger.begin_run("second", {"seed": 3})
        found = await ledger.snapshot()
        assert (found.run, found.leaving, found.overrides, found.record) == ("second", True, {"seed": 3}, Record())
        assert found.tags == await ledger.tags() == {"device a": "", "token t1": "icu"}, "they stay from run to run"
        assert (found.plan, found.slots, found.rows, found.refusals, found.variants) == (None, (), (), (), {})
        assert found.devices == (
            DeviceRecord("a", "key", enrolled_at=1.0, founder=True, token="t1"),
            DeviceRecord("b", "key", enrolled_at=2.0, founder=True, revoked=True, since=3.0),
        )
        assert [one.fingerprint for one in found.certificates] == ["f", "g"]
        assert [one.id for one in await ledger.tokens()] == ["t1"]
        await ledger.end_cleanup()
        assert not (await ledger.snapshot()).leaving
        await ledger.put_record(Record(round=1, paused=True))
        await ledger.begin_run("third", {})
        assert (await ledger.snapshot()).record == Record(paused=True), "a pause is of the fleet"

    run(storage.ledger, scenario)


# --- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = SqliteLedger(tmp_path / "state.sqlite")

    async def fill() -> None:
        for number in range(200):
            await made.enrol(f"device-{number}", "k" * 64, certificate(f"f{number}", f"device-{number}"), now=0.0)
        await made.close()

    aio.run(fill())
    return tmp_path / "state.sqlite"


def test_a_newer_schema_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {sqlite.VERSION + 1}")
    for opened in (SqliteLedger, SqliteReader):
        with pytest.raises(
            HomeMismatch,
            match=rf"newer version of fedserver \(schema {sqlite.VERSION + 1}; this one knows {sqlite.VERSION}\)",
        ):
            opened(path).snapshot()


VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE devices (
    name TEXT PRIMARY KEY, public_key TEXT NOT NULL, enrolled_at REAL NOT NULL, founder INTEGER NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0, connected INTEGER NOT NULL DEFAULT 0, since REAL NOT NULL DEFAULT 0, samples INTEGER,
    contributed INTEGER NOT NULL DEFAULT 0, fetched INTEGER NOT NULL DEFAULT -1, progress REAL NOT NULL DEFAULT 0,
    note TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '');
CREATE TABLE certificates (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, not_after REAL NOT NULL);
CREATE TABLE tokens (
    fingerprint TEXT PRIMARY KEY, bootstrap_pem BLOB NOT NULL, uses_left INTEGER NOT NULL, expires_at REAL NOT NULL,
    origin TEXT NOT NULL, used_up_at REAL);
INSERT INTO devices (name, public_key, enrolled_at, founder) VALUES ('a', 'key', 1, 1);
INSERT INTO certificates VALUES ('fa', 'a', 'device', 500);
INSERT INTO tokens VALUES ('0123456789abcdef0123', x'50', 3, 100, 'start', NULL);
PRAGMA user_version = 1;
"""


async def test_a_database_of_the_first_version_goes_on(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "state.sqlite") as db:
        db.executescript(VERSION_1)
    with closing(SqliteReader(tmp_path / "state.sqlite")) as reader:
        reader.check()
        assert reader.snapshot().devices == (DeviceRecord("a", "key", 1.0, founder=True),)
    made = SqliteLedger(tmp_path / "state.sqlite")
    assert await made.devices() == [DeviceRecord("a", "key", 1.0, founder=True)]
    assert await made.certificate("fa") == Certificate("fa", "a", "device", 500.0, used_at=0.0)
    assert await made.tokens() == [Token("0123456789abcdef0123", b"P", 3, 100.0, "start", id="0123456789abcdef", uses=3)]
    await made.close()
    SqliteLedger(tmp_path / "state.sqlite")


@pytest.mark.parametrize("at", [0, 4096 * 3])
def test_a_damaged_file_is_one_clear_error(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + 600] = bytes(600)
    path.write_bytes(data)

    with pytest.raises(HomeMismatch, match=r"damaged .*restore it from a backup"), closing(SqliteReader(path)) as reader:
        reader.check()


async def test_the_write_ahead_log_stays_for_the_file_that_a_backup_brings_back(tmp_path: Path) -> None:
    """Repeat seed 8114 of `make chaos`: a look at a cut file merged the log into it, and the restored file was an old one."""
    live, home = tmp_path / "live", tmp_path / "home"
    live.mkdir()

    def check() -> Record:
        with closing(SqliteReader(home / "state.sqlite")) as reader:
            reader.check()
            return reader.snapshot().record

    await SqliteLedger(live / "state.sqlite").close()  # closing moves its tables into the file itself
    ledger = SqliteLedger(live / "state.sqlite")
    await ledger.put_record(Record(round=7))
    shutil.copytree(live, home)  # as after kill -9: the last changes are in the log
    await ledger.close()
    whole, log = (home / "state.sqlite").read_bytes(), (home / "state.sqlite-wal").read_bytes()
    assert log
    (home / "state.sqlite").write_bytes(whole[: len(whole) // 4])
    with pytest.raises(HomeMismatch, match="damaged"):
        check()
    assert (home / "state.sqlite-wal").read_bytes() == log
    (home / "state.sqlite").write_bytes(whole)
    assert check().round == 7


def test_a_record_that_cannot_be_read_is_damage(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('record', ?)", (b'{"phase": "dancing"}',))

    with pytest.raises(HomeMismatch, match="damaged"), closing(SqliteReader(path)) as reader:
        reader.check()


async def test_a_lock_that_another_process_holds_is_an_error_that_passes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    ledger = SqliteLedger(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusy):
        await ledger.put_record(Record(round=1))
    other.execute("COMMIT")
    await ledger.put_record(Record(round=1))
    assert (await ledger.snapshot()).record.round == 1
    await ledger.close()


def full(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA max_page_count = 1")
        db.execute("CREATE TABLE more (of)")


def locked(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=0)) as db, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE more (of)")


def locked_within(path: Path) -> None:
    shared = f"{path.as_uri()}?cache=shared"
    with closing(sqlite3.connect(shared, uri=True, timeout=0)) as db, closing(sqlite3.connect(shared, uri=True)) as other:
        other.execute("CREATE TABLE more (of)")
        other.execute("INSERT INTO more VALUES (1)")
        db.execute("SELECT * FROM more")


def missing(path: Path) -> None:
    sqlite3.connect(path.parent / "nowhere" / "file")


def broken_disk(path: Path) -> None:
    """Limit the file's size, so that the system refuses to let it grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE more (of)")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        try:
            db.execute("INSERT INTO more VALUES (zeroblob(100000))")
            db.commit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mistaken(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT * FROM nothing")


def read_only(path: Path) -> None:
    sqlite3.connect(path).close()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        db.execute("CREATE TABLE more (of)")


@pytest.mark.parametrize(
    ("fault", "code", "passing"),
    [
        (full, "SQLITE_FULL", True),
        (locked, "SQLITE_BUSY", True),
        (locked_within, "SQLITE_LOCKED", True),
        (missing, "SQLITE_CANTOPEN", True),
        (broken_disk, "SQLITE_IOERR", True),
        (mistaken, "SQLITE_ERROR", False),
        (read_only, "SQLITE_READONLY", False),
    ],
)
def test_errors_that_pass_are_told_by_their_words(tmp_path, fault: Callable[[Path], None], code: str, passing: bool) -> None:
    with pytest.raises(sqlite3.OperationalError) as caught:
        fault(tmp_path / "db")
    assert passes(caught.value) is passing, caught.value
    if sys.version_info >= (3, 11):
        assert caught.value.sqlite_errorname.startswith(code)


async def test_the_event_loop_goes_on_while_the_ledger_waits(path: Path) -> None:
    ledger = SqliteLedger(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(ledger.put_record(Record(round=1)))
    turns = 0
    while turns < 20:
        await asyncio.sleep(0.005)
        turns += 1
    assert not waiting.done()
    other.execute("COMMIT")
    await waiting
    await ledger.close()
    assert turns == 20


async def test_whose_certificate_it_is_is_told_while_the_ledger_waits_for_the_disk(path: Path) -> None:
    """Read the file itself: a certificate that another process has just revoked is revoked."""
    ledger = SqliteLedger(path)
    await ledger.enrol("kiel", "key", certificate("f", "kiel"), 0.0)
    let_go, running = threading.Event(), asyncio.get_running_loop()
    waiting = running.run_in_executor(ledger._thread, let_go.wait)
    found = await ledger.certificate("f")
    assert found is not None and not found.revoked
    with sqlite3.connect(path) as other:
        other.execute("UPDATE devices SET revoked = 1")
    found = await ledger.certificate("f")
    assert found is not None and found.revoked
    let_go.set()
    await waiting
    await ledger.close()


async def test_who_enrolled_before_the_plan_survives_the_loss_of_the_write_ahead_log(tmp_path: Path) -> None:
    """Delete the log: SQLite silently goes back to the file's content, and devices would be unknown to their own server."""
    ledger = SqliteLedger(tmp_path / "state.sqlite")
    await ledger.enrol("a", "key-a", certificate("f-a", "a"), 1.0)
    await ledger.commit_round(Record(), [], [], {}, PLAN)
    shutil.copy(tmp_path / "state.sqlite", tmp_path / "copy.sqlite")  # as after the loss of the log
    await ledger.close()
    copied = SqliteLedger(tmp_path / "copy.sqlite")
    found = [device.name for device in await copied.devices()]
    await copied.close()
    assert found == ["a"]


CHANGES: dict[str, Callable[[SqliteLedger], Awaitable[Any]]] = {
    "enrol": lambda ledger: ledger.enrol("b", "key", certificate("fb", "b"), 1.0, "t"),
    "renew": lambda ledger: ledger.renew(certificate("f2", "a"), 1.0, 8, 1.0),
    "revoke": lambda ledger: ledger.update_device("a", revoked=True),
    "add a token": lambda ledger: ledger.add_token(token("t2")),
    "withdraw a token": lambda ledger: ledger.withdraw("1f", 1.0),
    "pause": lambda ledger: ledger.put_record(Record(paused=True)),
    "settings": lambda ledger: ledger.set_overrides({"seed": 1}),
    "begin a run": lambda ledger: ledger.begin_run("second", {}),
    "end a run": lambda ledger: ledger.end_run(Record(), {}),
    "commit": lambda ledger: ledger.commit_round(Record(round=1), [], [], {}),
}
PASSING_CHANGES: dict[str, Callable[[SqliteLedger], Awaitable[Any]]] = {
    "who is connected": lambda ledger: ledger.update_device("a", connected=True),
    "the record": lambda ledger: ledger.put_record(Record(round=1)),
    "a refusal": lambda ledger: ledger.refuse(Refusal("eve", "bad-token", "no", 5.0), keep=3),
}


@pytest.mark.parametrize("what", [*CHANGES, *PASSING_CHANGES])
def test_what_is_acknowledged_to_somebody_is_synced_and_nothing_else(tmp_path: Path, what: str) -> None:
    """Look at the statements: each that writes runs with the synchronous mode that was set before it."""

    async def scenario() -> list[str]:
        ledger, said = SqliteLedger(tmp_path / "state.sqlite"), list[str]()
        await ledger.add_token(Token("t", b"pem", 5, 100.0, "operator", id="1f", uses=5))
        await ledger.enrol("a", "key", certificate("fa", "a"), now=0.0)
        await ledger.put_record(Record())
        ledger._tables._db.connection.set_trace_callback(said.append)
        await (CHANGES | PASSING_CHANGES)[what](ledger)
        ledger._tables._db.connection.set_trace_callback(None)
        await ledger.close()
        return said

    mode, modes = "NORMAL", set[str]()
    for statement in aio.run(scenario()):
        if statement.startswith("PRAGMA synchronous"):
            mode = statement.split()[-1]
        elif statement.startswith(("COMMIT", "INSERT", "UPDATE", "DELETE")):
            modes.add(mode)
    assert modes == {"FULL" if what in CHANGES else "NORMAL"}
    assert mode == "NORMAL"
