"""What a kill leaves of accepted updates: the inbox's one rename."""

from __future__ import annotations

import pytest

from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import Row
from attune.fedserver.stores.inbox import Inbox


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
