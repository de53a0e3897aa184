"""Accepted updates: whole or absent, kept while the state may have to be rebuilt from them, and checked when read."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from attune.common.wire.blobs import Blob
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import Report
from attune.fedserver.ports.blobs import INBOX, Blobs
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.inbox import Inbox
from attune.simulation.memory import MemoryBlobs


@pytest.fixture(params=["folder", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return FolderBlobs(tmp_path) if request.param == "folder" else MemoryBlobs()


def row(order: OrderId) -> Report:
    return Report(round=order.round, work=order.work, client=order.client, samples=1)


def parts(blobs: Blobs, text: str) -> dict[str, Blob]:
    """Return the parts as an upload leaves them."""
    return {"shared": blobs.put("uploads/x", text.encode())}


def accept(blobs: Blobs, inbox: Inbox, *order: object) -> OrderId:
    made = OrderId(*order)  # type: ignore[arg-type]
    inbox.accept(made, row(made), parts(blobs, str(made)))
    return made


def test_an_update_is_there_whole_and_the_first_one_stays(blobs: Blobs) -> None:
    inbox, order = Inbox(blobs), OrderId("train", 1, "a")
    assert not inbox.holds(order)
    inbox.accept(order, row(order), parts(blobs, "first"))
    inbox.accept(order, row(order), parts(blobs, "second"))
    [entry] = Inbox(blobs).entries("train", 1).values()
    assert (entry.row, blobs.get(entry.parts["shared"].name)) == (row(order), b"first")
    assert blobs.names("uploads/") == ["uploads/x"], "the second is not taken"


def test_what_a_kill_left_half_done_goes_at_the_next_start(blobs: Blobs) -> None:
    order = OrderId("train", 1, "a")
    blobs.put(f"inbox/{order}/shared.safetensors", b"half")
    inbox = Inbox(blobs)
    assert (inbox.entries("train", 1), inbox.names("train", 1), inbox.holds(order)) == ({}, set(), False)
    inbox.clear_except("train", 1, 0)
    assert blobs.names("") == []


def test_entries_are_of_one_round_and_work_in_name_order(blobs: Blobs) -> None:
    inbox = Inbox(blobs)
    for order in [("train", 2, "b"), ("train", 2, "a-1"), ("train", 11, "c"), ("evaluate", 2, "d"), ("train", 1, "e")]:
        accept(blobs, inbox, *order)
    assert list(inbox.entries("train", 2)) == ["a-1", "b"]
    assert inbox.names("train", 1) == {"e"}


def test_a_device_that_evaluates_before_the_round_is_tidied_up_is_not_forgotten(blobs: Blobs) -> None:
    """Delete a cohort's updates while the devices already work on the next order."""
    inbox = Inbox(blobs)
    for order in [("train", 1, "a"), ("train", 2, "a"), ("evaluate", 1, "a"), ("evaluate", 2, "b")]:
        accept(blobs, inbox, *order)
    inbox.clear(2)
    assert [list(inbox.entries("evaluate", number)) for number in (1, 2)] == [[], ["b"]]


class Busy(MemoryBlobs):
    """Store that gets answers on other threads: `meanwhile` is called once, when it begins to list its content."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def names(self, prefix: str) -> list[str]:
        if prefix == INBOX and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().names(prefix)


def test_what_is_accepted_while_the_round_is_tidied_up_stays() -> None:
    """Expect this, because the update is durable, and its device has its receipt."""
    blobs = Busy()
    inbox = Inbox(blobs)
    for order in [("train", 1, "a"), ("train", 2, "a")]:
        accept(blobs, inbox, *order)
    later = [("evaluate", 2, "b"), ("train", 3, "c")]
    blobs.meanwhile = lambda: [accept(blobs, inbox, *order) for order in later]
    inbox.clear(2)
    assert [list(inbox.entries(*which)) for which in [("train", 1), ("evaluate", 2), ("train", 3)]] == [[], ["b"], ["c"]]


def test_of_an_evaluation_goes_what_was_committed() -> None:
    inbox = Inbox(blobs := MemoryBlobs())
    for order in [("evaluate", 2, "a"), ("evaluate", 2, "b"), ("evaluate", 2, "c")]:
        accept(blobs, inbox, *order)
    inbox.clear_evaluation(2, ["a", "c"])
    assert list(inbox.entries("evaluate", 2)) == ["b"], "it came after the commit"


def test_the_last_closed_round_stays_until_the_next_is_closed(blobs: Blobs) -> None:
    inbox = Inbox(blobs)
    for order in [("train", 1, "a"), ("train", 2, "a"), ("train", 2, "b"), ("evaluate", 1, "a")]:
        accept(blobs, inbox, *order)
    inbox.clear(1)
    inbox.clear_evaluation(1, ["a"])
    assert [list(inbox.entries(*which)) for which in [("train", 1), ("train", 2), ("evaluate", 1)]] == [["a"], ["a", "b"], []]
    inbox.discard(OrderId("train", 1, "a"))  # a device that has not received its receipt sends it again
    assert list(inbox.entries("train", 1)) == ["a"], "the state was made of it"
    inbox.discard(OrderId("train", 2, "b"))
    inbox.clear(2)
    assert [list(inbox.entries("train", number)) for number in (1, 2)] == [[], ["a"]]


def test_a_start_keeps_the_open_round_and_the_last_closed_one(blobs: Blobs) -> None:
    inbox = Inbox(blobs)
    for order in [("train", 4, "a"), ("train", 5, "b"), ("train", 6, "c"), ("evaluate", 4, "d"), ("evaluate", 5, "e")]:
        accept(blobs, inbox, *order)
    again = Inbox(blobs)
    again.clear_except("evaluate", 5, 5)
    assert sorted({name.split("/")[1] for name in blobs.names("inbox/")}) == ["evaluate-5-e", "train-5-b"]
    again.discard(OrderId("train", 5, "b"))
    assert list(again.entries("train", 5)) == ["b"]


@pytest.mark.parametrize(("file", "at"), [("shared.safetensors", 0), ("update.json", 0), ("update.json", "a digit")])
def test_a_damaged_update_is_named_and_thrown_away_so_that_it_is_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, at: int | str
) -> None:
    blobs = FolderBlobs(tmp_path)
    inbox = Inbox(blobs)
    accept(blobs, inbox, "train", 3, "kiel")
    accept(blobs, inbox, "train", 3, "bonn")
    path = tmp_path / "inbox" / "train-3-kiel" / file
    data = bytearray(path.read_bytes())
    data[data.index(b'"round":3') + 8 if isinstance(at, str) else at] ^= 1
    path.write_bytes(data)
    again = Inbox(FolderBlobs(tmp_path))
    [line] = again.damaged()
    assert f"train-3-kiel/{file}" in line
    assert again.names("train", 3) == {"bonn", "kiel"}
    with caplog.at_level(logging.WARNING):
        assert list(again.entries("train", 3)) == ["bonn"]
    assert f"train-3-kiel/{file} is damaged" in caplog.text
    assert not again.holds(OrderId("train", 3, "kiel"))
    assert not path.parent.exists()
