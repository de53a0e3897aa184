"""State of a device between orders: it is checked when it is loaded, and keeps the order before to continue from."""

from pathlib import Path

import msgspec
import pytest
import torch

from attune.common.errors import HomeMismatch
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.state import FolderOrders

FILES = ["state.safetensors", "shared.safetensors", "received.safetensors", "update.json"]


def commit(orders: FolderOrders, number: int) -> OrderResult:
    value = torch.full((3,), float(number))
    result = OrderResult(order_id=f"train-{number}-kiel", round=number, trained=True, samples=1, sequence=number, loss=0.125)
    return orders.commit(result, {"w": value, "b": value}, {"received": {"w": value}}, {"shared": {"w": value}})


@pytest.fixture
def orders(tmp_path: Path) -> FolderOrders:
    made = FolderOrders(tmp_path / "orders")
    for number in (1, 2, 3):
        commit(made, number)
    return made


def flip(path: Path) -> None:
    """Flip one bit of a tensor, or of a digit such that it stays one."""
    data = bytearray(path.read_bytes())
    place = data.index(b"0.125") + 2 if path.name == "update.json" else len(data) - 3
    data[place] ^= 2
    path.write_bytes(data)


def names(orders: FolderOrders) -> list[str]:
    return sorted(path.name for path in orders.path.iterdir())


def test_the_order_before_the_newest_is_kept_until_the_next_commit(orders: FolderOrders) -> None:
    assert names(orders) == ["train-2-kiel", "train-3-kiel"]
    again = FolderOrders(orders.path)
    newest = again.newest()
    assert newest is not None and newest.order_id == "train-3-kiel"
    assert again.damage == again.damaged() == []
    commit(again, 4)
    assert names(orders) == ["train-3-kiel", "train-4-kiel"]


def test_the_text_is_checked_and_not_how_this_version_would_write_it(orders: FolderOrders) -> None:
    """Use a default that is not the same object, so that it is written, although this version would leave it out."""
    task = msgspec.json.decode(b'"classes"')
    orders.commit(OrderResult(order_id="train-4-kiel", round=4, trained=True, samples=1, sequence=4, task=task), {}, {}, {})
    path = orders.path / "train-4-kiel" / "update.json"
    assert b'"task"' in path.read_bytes()
    assert FolderOrders(orders.path).damaged() == []
    text = path.read_bytes().replace(b'"samples": 1', b'"samples": 2')
    path.write_bytes(text)
    assert FolderOrders(orders.path).damaged() == [f"{path} is damaged (its text is not what was written)"]


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_order_is_named_and_the_one_before_it_is_gone_on_from(orders: FolderOrders, file: str) -> None:
    path = orders.path / "train-3-kiel" / file
    flip(path)
    again = FolderOrders(orders.path)
    assert [line.split(" is damaged")[0] for line in again.damaged()] == [str(path)]
    newest = again.newest()
    assert newest is not None and newest.order_id == "train-2-kiel"
    assert again.state(newest)["w"].tolist() == [2.0] * 3
    [line] = again.damage
    assert line.startswith(f"{path} is damaged") and "going on from train-2-kiel" in line
    assert names(orders) == ["train-2-kiel"]
    commit(again, 3)  # the server asks for it again
    assert names(orders) == ["train-2-kiel", "train-3-kiel"]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_a_damaged_one(orders: FolderOrders, file: str) -> None:
    (orders.path / "train-3-kiel" / file).unlink()
    newest = FolderOrders(orders.path).newest()
    assert newest is not None and newest.order_id == "train-2-kiel"


@pytest.mark.parametrize("file", FILES)
def test_without_a_whole_order_nothing_is_lost_and_it_says_what_to_restore(orders: FolderOrders, file: str) -> None:
    for number in (2, 3):
        flip(orders.path / f"train-{number}-kiel" / file)
    before = {path: path.read_bytes() for path in orders.path.rglob("*") if path.is_file()}
    with pytest.raises(HomeMismatch, match=rf"train-3-kiel/{file} is damaged.*restore {orders.path}") as caught:
        FolderOrders(orders.path).newest()
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in orders.path.rglob("*") if path.is_file()} == before


def test_a_damaged_order_before_the_newest_is_no_loss(orders: FolderOrders) -> None:
    flip(orders.path / "train-2-kiel" / "update.json")
    again = FolderOrders(orders.path)
    newest = again.newest()
    assert newest is not None and newest.order_id == "train-3-kiel"
    assert names(orders) == ["train-3-kiel"]


def test_an_older_order_that_is_issued_again_takes_the_place_of_the_first(orders: FolderOrders) -> None:
    commit(orders, 2)
    assert names(orders) == ["train-2-kiel", "train-3-kiel"]
    commit(orders, 4)
    assert names(orders) == ["train-2-kiel", "train-4-kiel"]
