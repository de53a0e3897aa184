"""A flipped byte in a row of the database is noticed by the check of a start and of `fedserver verify`, in every table."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from attune.common import aio
from attune.common.config import TrainSettings
from attune.common.errors import HomeMismatch
from attune.common.plan import ModelSpec, Plan
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import Report, Slot
from attune.fedserver.ports.ledger import Certificate, Refusal, Token
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.sqlite import SqliteLedger, SqliteReader

PLAN = Plan("f" * 40, 0, ModelSpec("mlr", "tabular", (2,), 2), [0, 1], "fedavg", {}, TrainSettings())
# A text of each kind of row, of which one byte is changed.
TEXTS = {
    "plan": b'"federation":"ffff',
    "settings": b'{"rounds":40',
    "record": b'"phase":"training"',
    "audit head": b'{"number":1',
    "device": b"of the device kiel",
    "certificate": b"fingerprint of kiel",
    "token": b"pem of the token",
    "refusal": b"was refused because",
    "slot": b"digest of the slot",
    "metric": b'"loss":0.5',
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    async def fill() -> None:
        ledger = SqliteLedger(tmp_path / "state.sqlite")
        await ledger.note("token made", "a test")
        await ledger.set_overrides({"round": {"rounds": 40}})
        await ledger.add_token(Token("f", b"pem of the token", 5, 100.0, "operator", id="1f"))
        await ledger.enrol(
            "kiel", "key of the device kiel", Certificate("fingerprint of kiel", "kiel", "device", 1e9), 1.0, "f"
        )
        await ledger.refuse(Refusal("eve", "bad-token", "was refused because", 5.0), keep=3)
        slot, row = (
            Slot("shared", "value", "file", "digest of the slot", 8),
            Report(round=1, work="train", client="kiel", loss=0.5),
        )
        await ledger.commit_round(Record(round=1), [slot], [row], {"kiel": {"contributed": 1}}, PLAN)
        await ledger.put_record(Record(phase="training", round=1))  # type: ignore[arg-type]
        await ledger.update_device("kiel", connected=True, note="a note")
        await ledger.first_use("fingerprint of kiel", 3.0, 4.0)
        await ledger.close()

    aio.run(fill())
    return tmp_path / "state.sqlite"


def check(path: Path) -> None:
    with closing(SqliteReader(path)) as reader:
        reader.check()


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def test_what_was_written_has_its_digests(path: Path) -> None:
    check(path)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_changed_byte_of_each_kind_of_row_is_damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    assert data.count(TEXTS[kind]) >= 1
    at = data.index(TEXTS[kind]) + len(TEXTS[kind]) - 2
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(HomeMismatch, match=r"damaged .*restore it from a backup"):
        check(path)


def _places(data: bytes) -> Iterator[int]:
    """Yield some bytes of each page: all of the file's header, and of its pages those that are not zero."""
    yield from range(100)
    yield from [at for at in range(100, len(data)) if data[at]][::23]


def test_a_changed_byte_anywhere_is_damage_or_changes_no_content(path: Path) -> None:
    data, before = path.read_bytes(), content(path)
    silent = []
    for at in _places(data):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :])
        for more in path.parent.glob("state.sqlite-*"):
            more.unlink()
        try:
            check(path)
        except HomeMismatch:
            continue
        if content(path) != before:
            silent.append(at)
    assert silent == []


def test_a_start_refuses_a_changed_plan_before_any_device_hears_of_it(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"federation":"ffff', b'"federation":"fffe'))
    with pytest.raises(HomeMismatch, match="a row of meta, 'plan'"):
        DiskStorage(path.parent).check_ledger()


def test_a_copy_of_a_run_has_digests_of_its_own(path: Path) -> None:
    storage = DiskStorage(path.parent)
    storage.create()
    storage.copy_run(path.parent / "copy")
    check(path.parent / "copy" / "state.sqlite")
