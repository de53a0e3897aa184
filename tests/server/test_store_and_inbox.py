"""What a kill leaves: the database's one commit point, and the inbox's one rename."""

from __future__ import annotations

import pytest

from attune.fedserver.core.messages import OrderId, Phase, Record
from attune.fedserver.core.records import Row, Slot
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.sqlite import Store


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state.sqlite")
    yield made
    made.close()


def test_the_record_and_settings_come_back(store, tmp_path):
    assert store.get("plan") is None
    assert store.record() == Record()
    record = Record(phase=Phase.TRAINING, round=3, devices=("a", "b"), cohort=("a",), opened_at=12.5)
    store.put("record", record)
    store.put("overrides", {"round": {"rounds": 4}})
    again = Store(tmp_path / "state.sqlite")
    assert (again.record(), again.get("overrides")) == (record, {"round": {"rounds": 4}})
    again.close()


def test_a_round_is_committed_whole_or_not_at_all(store):
    store.add_device("a", "key")
    slots = [Slot("shared", "value", "shared.1.safetensors", "0" * 64, 8)]
    rows = [Row(round=1, work="train", client="a", samples=3, loss=0.5)]
    impossible = Row(round=1 << 64, work="train", client="a")  # more than SQLite's integers hold: the last write fails
    with pytest.raises(OverflowError):
        store.commit_round(Record(round=1), slots, [impossible], {"a": {"contributed": 1}})
    assert (store.record(), store.slots(), store.rows()) == (Record(), [], [])
    assert store.device("a").contributed == 0
    store.commit_round(Record(round=1), slots, rows, {"a": {"contributed": 1, "fetched": 0}})
    assert (store.record().round, store.slots(), store.rows()) == (1, slots, rows)
    assert (store.device("a").contributed, store.device("a").fetched) == (1, 0)


def test_devices_are_listed_by_name_and_disconnected_at_start(store):
    for name in ("b", "a"):
        store.add_device(name, f"key of {name}")
    store.update_device("b", connected=1, since=1.0, samples=7)
    store.disconnect_all()
    assert [(device.name, device.connected) for device in store.devices()] == [("a", False), ("b", False)]
    assert (store.device("b").samples, store.device("b").since > 1.0) == (7, True)
    assert store.device("c") is None


@pytest.fixture
def parts(tmp_path):
    """Makes part files as an upload would leave them."""

    def make(text):
        path = tmp_path / "upload"
        path.write_text(text)
        return {"shared": path}

    return make


def row(order):
    return Row(round=order.round, work=order.work, client=order.client, samples=1)


def test_an_update_is_there_whole_and_the_first_one_stays(tmp_path, parts):
    inbox, order = Inbox(tmp_path / "inbox"), OrderId("train", 1, "a")
    assert not inbox.holds(order)
    inbox.accept(order, row(order), parts("first"))
    inbox.accept(order, row(order), parts("second"))
    [entry] = Inbox(tmp_path / "inbox").entries("train", 1).values()
    assert (entry.row, entry.parts["shared"].read_text()) == (row(order), "first")


def test_what_a_kill_left_half_done_goes_at_the_next_start(tmp_path, parts):
    inbox, order = Inbox(tmp_path / "inbox"), OrderId("train", 1, "a")
    half = tmp_path / "inbox" / f".filling-{order}"
    half.mkdir()
    (half / "shared.safetensors").touch()
    assert inbox.entries("train", 1) == {}
    assert Inbox(tmp_path / "inbox").holds(order) is False
    assert not half.exists()


def test_entries_are_of_one_round_and_work_in_name_order(tmp_path, parts):
    inbox = Inbox(tmp_path / "inbox")
    orders = [("train", 1, "b"), ("train", 1, "a-1"), ("train", 11, "c"), ("evaluate", 1, "d")]
    for order in (OrderId(*order) for order in orders):
        inbox.accept(order, row(order), parts("x"))
    assert list(inbox.entries("train", 1)) == ["a-1", "b"]
    inbox.clear_except("train", 1)
    assert list(inbox.entries("train", 11)) == list(inbox.entries("evaluate", 1)) == []
    inbox.discard(OrderId("train", 1, "b"))
    assert list(inbox.entries("train", 1)) == ["a-1"]
    inbox.clear("train", 1)
    assert list((tmp_path / "inbox").iterdir()) == []
