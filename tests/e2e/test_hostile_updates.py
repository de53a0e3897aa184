"""One of three devices hands in wrong updates of every kind: each is refused by name, and the round closes with the others."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests.e2e.hand import CALL_S, Hand, Stream, kind_of, moved, refusal
from tests.e2e.harness import Federation, FederationAt, Server

ACCEPTED, LATE = pb.Receipt.STATUS_ACCEPTED, pb.Receipt.STATUS_LATE
OUTSIDE = "sha256:" + "0" * 64


@dataclass
class Trio:
    """Ada and Bob, who behave, and Eve, who is under test, at a server that has very many rounds."""

    federation: Federation
    server: Server
    hands: dict[str, Hand] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    closed: int = 0

    def connect(self, name: str) -> None:
        self.hands[name] = Hand(self.server.port, self.server.join_token, name)
        self.streams[name] = self.hands[name].connect()


class Round:
    """One open round, as Eve sees it."""

    def __init__(self, trio: Trio) -> None:
        self.trio, self.eve = trio, trio.hands["eve"]
        self.orders = {name: stream.next("order") for name, stream in trio.streams.items()}
        assert {order.round for order in self.orders.values()} == {trio.closed + 1}
        self.order = self.orders["eve"]
        self.good = moved(self.eve.served(self.order)["shared"], 1.0)
        self.is_closed = False

    def close(self) -> None:
        """Answer as the others. The round does not wait for Eve, who gives up if she has not answered."""
        if self.is_closed:
            return
        self.trio.streams["eve"].say(trouble=pb.Trouble(order_id=self.order.id, reason="eve gives up"))
        for name in ("ada", "bob"):
            assert self.trio.hands[name].answer(self.orders[name]).status == ACCEPTED
        self.is_closed, self.trio.closed = True, self.trio.closed + 1
        # A receipt does not wait for the aggregation.
        self.trio.federation.await_status(lambda status: status["round"] == self.trio.closed)

    def note(self) -> str:
        return str(self.trio.federation.client("eve")["note"])


@pytest.fixture(scope="module")
def trio(federation_at: FederationAt) -> Trio:
    federation = federation_at("hostile")
    server = federation.server(
        "--method", "fedavg", "--model", "mlr", "--min-clients", "3", "--rounds", "1000", "--set", "round.quorum=2"
    )
    trio = Trio(federation, server)
    for name in ("ada", "bob", "eve"):
        trio.connect(name)
    return trio


@pytest.fixture
def opened(trio: Trio) -> Iterator[Round]:
    current = Round(trio)
    yield current
    current.close()


# --- what is in the blob


def _name(tensors: dict[str, Any]) -> str:
    return max(tensors, key=lambda name: tensors[name].size)


def _with(tensors: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return tensors | {_name(tensors): change(tensors[_name(tensors)])}


def test_wrong_tensors_are_refused_by_name_and_the_operator_sees_why(opened):
    """One kind of them; tests/attacks/attacks.py has the others, and blobs that hold no tensors."""
    ref = opened.eve.send(opened.order.id, "shared", _with(opened.good, lambda tensor: tensor.reshape(-1)))
    kind, message = refusal(lambda: opened.eve.submit(opened.order.id, [ref]))
    assert (kind, "eve" in message) == ("wrong-shape", True)
    assert message[:100] in opened.note()


def test_a_refused_device_may_correct_itself_while_the_round_is_open(opened):
    bad = opened.eve.send(opened.order.id, "shared", _with(opened.good, lambda tensor: tensor * np.float32(np.nan)))
    assert kind_of(lambda: opened.eve.submit(opened.order.id, [bad])) == "not-finite"
    good = opened.eve.send(opened.order.id, "shared", opened.good)
    assert opened.eve.submit(opened.order.id, [good]).status == ACCEPTED


# --- what is said about it


def test_the_size_that_is_said_is_not_believed(opened):
    ref = opened.eve.send(opened.order.id, "shared", opened.good)
    ref.size = (1 << 64) - 1
    assert opened.eve.submit(opened.order.id, [ref]).status == ACCEPTED
    opened.close()
    row = next(r for r in opened.trio.federation.metrics() if (r["client"], int(r["round"])) == ("eve", opened.trio.closed))
    assert int(row["bytes_up"]) == len(save(opened.good))


def test_a_blob_that_was_never_uploaded_is_unknown_and_can_still_come(opened):
    data = save(opened.good)
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
    assert kind_of(lambda: opened.eve.submit(opened.order.id, [ref])) == "unknown-blob"
    opened.eve.send(opened.order.id, "shared", opened.good)
    assert opened.eve.submit(opened.order.id, [ref]).status == ACCEPTED


def test_sending_again_is_accepted_again_and_counts_once(opened):
    ref = opened.eve.send(opened.order.id, "shared", opened.good)
    receipts = [opened.eve.submit(opened.order.id, [ref]).status for _ in range(3)]
    assert receipts == [ACCEPTED] * 3
    opened.close()
    rows = opened.trio.federation.metrics()
    assert [row["client"] for row in rows if int(row["round"]) == opened.trio.closed] == ["ada", "bob", "eve"]


def test_sending_twice_at_once_is_accepted_twice(opened):
    ref = opened.eve.send(opened.order.id, "shared", opened.good)
    with ThreadPoolExecutor(4) as pool:
        receipts = list(pool.map(lambda _: opened.eve.submit(opened.order.id, [ref]).status, range(4)))
    assert receipts == [ACCEPTED] * 4


def test_an_answer_after_its_round_is_late_and_nothing_else(opened):
    ref = opened.eve.send(opened.order.id, "shared", opened.good)
    opened.close()
    assert opened.eve.submit(opened.order.id, [ref]).status == LATE
    assert kind_of(lambda: opened.eve.upload(opened.order.id, "shared", [b"x"], OUTSIDE, 1)) == "order-closed"


# --- how it is uploaded


def _target(opened: Round, **said: Any) -> pb.UploadTarget:
    data = save(opened.good)
    usual = {"order_id": opened.order.id, "part": "shared", "digest": digest_of(data), "size": len(data)}
    return pb.UploadTarget(**(usual | said))


def test_a_truncated_upload_goes_on_where_it_stopped(opened):
    data, eve = save(opened.good), opened.eve
    whole = (digest_of(data), len(data))
    assert kind_of(lambda: eve.upload(opened.order.id, "shared", [data[:50]], *whole)) == "truncated"
    assert eve.blobs.UploadOffset(_target(opened), timeout=CALL_S).offset == 50
    ref = pb.BlobRef(part="shared", digest=whole[0], size=whole[1])
    assert kind_of(lambda: eve.submit(opened.order.id, [ref])) == "unknown-blob"
    kind, message = refusal(lambda: eve.upload(opened.order.id, "shared", [data[60:]], *whole, offset=60))
    assert (kind, "50 bytes" in message) == ("update-refused", True)
    # Duplicates are accepted once.
    assert eve.upload(opened.order.id, "shared", [data[40:70], data[70:]], *whole, offset=40) == len(data)
    assert eve.blobs.UploadOffset(_target(opened), timeout=CALL_S).offset == len(data)
    assert eve.submit(opened.order.id, [ref]).status == ACCEPTED


# --- the control stream


def test_trouble_ends_the_wait_and_is_shown(opened):
    opened.trio.streams["eve"].say(trouble=pb.Trouble(order_id=opened.order.id, reason="out of memory"))
    opened.trio.federation.await_status(lambda status: "out of memory" in str(status["clients"][2]["note"]))
    opened.trio.streams["eve"].say(trouble=pb.Trouble(order_id="train-1-ada", reason="not mine"))
    opened.trio.streams["eve"].say(progress=pb.Progress(order_id="x", done=float("nan")))
    assert opened.note() == "out of memory"


def test_a_second_stream_closes_the_first_and_gets_the_same_order(opened):
    first = opened.trio.streams["eve"]
    second = opened.trio.streams["eve"] = opened.eve.connect()
    assert kind_of(first.end) == "replaced"
    assert second.next("welcome").plan_json
    again = second.next("order")
    assert (again.id, list(again.downloads)) == (opened.order.id, list(opened.order.downloads))


def test_after_all_that_the_mean_is_right_and_the_server_ends_well(opened, trio):
    """Check that refused updates are in no mean: two devices that add 1 and 3 move the common model by exactly 2."""
    before = opened.trio.hands["ada"].served(opened.orders["ada"])["shared"]
    trio.streams["eve"].say(trouble=pb.Trouble(order_id=opened.order.id, reason="done"))
    for name, change in (("ada", 1.0), ("bob", 3.0)):
        assert trio.hands[name].answer(opened.orders[name], change).status == ACCEPTED
    opened.is_closed, trio.closed = True, trio.closed + 1
    trio.federation.await_status(lambda status: status["round"] == trio.closed)
    after = load(trio.federation.export()["shared.safetensors"])
    assert all(np.allclose(after[name], before[name] + 2.0, rtol=1e-6, atol=1e-5) for name in before)
    assert trio.federation.status()["reason"] is None
    assert trio.server.stop() == 0
    assert "Traceback" not in trio.server.text, trio.server.text
