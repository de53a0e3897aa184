"""Every message has its recorded bytes, and devices that know only the recorded version 1 take part to the end."""

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load

from attune.common.exchange import protobuf as exchange
from attune.common.exchange.messages import (
    Beat,
    BlobRef,
    DownloadRequest,
    EnrolRequest,
    Farewell,
    Hello,
    IssuedCertificate,
    Notice,
    Order,
    Progress,
    Receipt,
    SecureMember,
    SecureMessage,
    Trouble,
    Update,
    UploadTarget,
    Welcome,
)
from attune.common.metrics import Metrics, read_metrics
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile
from tests.e2e.harness import Federation
from tests.protocol.peer import Peer

# Recorded at commit 82b576c, when each side had classes and a converter of its own.
RECORDED: dict[str, str] = json.loads(Path(__file__).with_name("recorded_messages.json").read_bytes())
D1, D2, D3 = (f"sha256:{digit * 64}" for digit in "abc")
PROFILE = Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5)
ORDER = Order(
    "train-4-kiel",
    4,
    "train",
    downloads=(
        BlobRef("shared", D1, 100, 3, smaller=BlobRef("shared", D2, 70, 3, "zstd", b"seventy bytes"), base=D3),
        BlobRef("attended", D3, 90, 3, data=b"inline"),
    ),
    returns=("attended", "shared"),
    cold_start=(BlobRef("shared", D1, 100, 3),),
    trains=("shared", "private"),
    deadline_s=12.5,
    encodings={"shared": "int8"},
    prior={"common": 0.25},
)
UPDATE = Update(
    "train-4-kiel",
    (BlobRef("attended", D3, 90, 3, data=b"inline"), BlobRef("shared", D2, 70, 3, "int8")),
    20,
    msgspec.json.encode(Metrics(loss=0.5, test_samples=5)),
)
HELLO = Hello("attune 0.1.0", msgspec.json.encode(PROFILE), ("bf16", "int8", "zstd", "per-part", "change"), 1 << 20)
MESSAGES: dict[str, tuple[Any, exchange.Codec]] = {
    "order": (ORDER, exchange.TO_DEVICE),
    "evaluate": (Order("evaluate-0-kiel", 0, "evaluate"), exchange.TO_DEVICE),
    "welcome": (Welcome(b'{"a":1}', 65536, waits=True), exchange.TO_DEVICE),
    "notice": (Notice("waiting for 2 more devices"), exchange.TO_DEVICE),
    "finish": (Farewell("all 2 rounds are done"), exchange.TO_DEVICE),
    "server beat": (Beat(2.0), exchange.TO_DEVICE),
    "hello": (HELLO, exchange.TO_SERVER),
    "progress": (Progress("train-4-kiel", 0.5), exchange.TO_SERVER),
    "trouble": (Trouble("train-4-kiel", "too hot"), exchange.TO_SERVER),
    "decline": (Trouble("", "no room"), exchange.TO_SERVER),
    "device beat": (Beat(2.0), exchange.TO_SERVER),
    "update": (UPDATE, exchange.UPDATE),
    "target": (UploadTarget("train-4-kiel", "shared", D2, 70, 16), exchange.TARGET),
    "download": (DownloadRequest(D2, 16), exchange.DOWNLOAD_REQUEST),
    "received": (70, exchange.RECEIVED),
    "offset": (16, exchange.OFFSET),
    "accepted": (Receipt(), exchange.RECEIPT),
    "late": (Receipt("round 4 is closed"), exchange.RECEIPT),
    "enrol": (EnrolRequest("kiel", b"csr"), exchange.ENROL_REQUEST),
    "renew": (b"csr", exchange.RENEW_REQUEST),
    "certificate": (IssuedCertificate(b"pem", b"ca", "kiel"), exchange.CERTIFICATE),
}


def test_every_recorded_message_is_written_here() -> None:
    assert MESSAGES.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_bytes_that_were_recorded(name: str) -> None:
    message, codec = MESSAGES[name]
    assert codec.write(message).hex() == RECORDED[name]
    assert codec.read(bytes.fromhex(RECORDED[name])) == message


def test_an_order_of_an_earlier_server_that_asks_for_finishing_is_read_without() -> None:
    sent = pb.ServerMessage.FromString(exchange.TO_DEVICE.write(ORDER))
    sent.order.finish_epochs = 1 << 31
    sent.order.finish_stops.extend([5, 10])
    assert exchange.TO_DEVICE.read(sent.SerializeToString()) == ORDER


def test_a_report_of_an_earlier_device_that_finished_is_read() -> None:
    sent = b'{"kept":"finished-common","likelihood_after_0":-3.5,"likelihood_after_20":-2.5}'
    assert read_metrics(sent, "kiel") == Metrics(kept="finished-common")


SECURE = SecureMessage(
    "train-4-kiel",
    2,
    "unmasking",
    (SecureMember("bonn", b"m" * 32, b"s" * 32, b"der", b"sig", b"share"), SecureMember("kiel")),
    4,
    "not today",
)


@pytest.mark.parametrize("codec", [exchange.TO_DEVICE, exchange.TO_SERVER])
@pytest.mark.parametrize("name", ["keys", "shares", "masked", "survivors", "unmasking"])
def test_messages_of_secure_aggregation_are_read_as_they_were_written(codec: exchange.Codec, name: Any) -> None:
    message = replace(SECURE, exchange=name)
    assert codec.read(codec.write(message)) == message


def test_a_masked_update_names_its_attempt() -> None:
    assert exchange.UPDATE.read(exchange.UPDATE.write(replace(UPDATE, attempt=3))) == replace(UPDATE, attempt=3)


def test_what_a_peer_says_in_secure_aggregation_is_bounded() -> None:
    members = [pb.SecureMember(name="\x1b" * 1000)] * 2000
    said = pb.SecureMessage(exchange=pb.SECURE_EXCHANGE_KEYS, members=members, refused="no\n" * 1000)
    heard = exchange.TO_SERVER.read(pb.DeviceMessage(secure=said).SerializeToString())
    assert isinstance(heard, SecureMessage)
    assert (len(heard.members), len(heard.members[0].name), len(heard.refused)) == (257, 500, 500)
    unknown = pb.SecureMessage(exchange=9)  # type: ignore[arg-type]
    assert exchange.TO_SERVER.read(pb.DeviceMessage(secure=unknown).SerializeToString()) is None
    assert exchange.TO_DEVICE.read(pb.ServerMessage(secure=unknown).SerializeToString()) is None


def test_of_what_others_found_only_shares_with_possible_names_are_heard() -> None:
    said = {"personalized": float("nan"), "common": 0.4, "local": -1.0, "Not a name": 0.3, "x" * 33: 0.3, "forest": 0.0}
    order = pb.Order(id="evaluate-1-a", round=1, work=pb.WORK_EVALUATE, prior=said)
    assert _heard(order).prior == {"common": 0.4}
    order.prior["common"] = float("inf")
    assert _heard(order).prior == {}


def _heard(order: pb.Order) -> Order:
    message = exchange.TO_DEVICE.read(pb.ServerMessage(order=order).SerializeToString())
    assert isinstance(message, Order)
    return message


@pytest.mark.parametrize("message", [pb.ServerMessage(), pb.ServerMessage(order=pb.Order(id="x", work=9))])
def test_what_a_newer_server_may_say_is_no_message(message: pb.ServerMessage) -> None:
    assert exchange.TO_DEVICE.read(message.SerializeToString()) is None


def test_text_of_a_peer_is_one_line_of_bounded_length() -> None:
    notice = pb.ServerMessage(notice=pb.Notice(text="a\x1b[2J\nb" + "c" * 1000))
    heard = exchange.TO_DEVICE.read(notice.SerializeToString())
    assert isinstance(heard, Notice) and heard.text.startswith("a [2J b") and len(heard.text) <= 500
    hello = pb.DeviceMessage(hello=pb.Hello(software="x\n" * 100))
    said = exchange.TO_SERVER.read(hello.SerializeToString())
    assert isinstance(said, Hello) and "\n" not in said.software and len(said.software) <= 40


def test_a_receipt_of_no_known_kind_is_none() -> None:
    assert exchange.RECEIPT.read(b"") is None
    assert exchange.RECEIPT.read(pb.Receipt(status=pb.Receipt.STATUS_LATE).SerializeToString()) == Receipt(
        "its round is closed"
    )


ROUNDS = 2
ACCEPTED, LATE = 1, 2  # Receipt.Status
METRICS = {"loss": 0.5, "accuracy_before": 0.25, "accuracy_after": 0.75, "test_samples": 5, "seconds": 1.5, "bytes_down": 7}


@dataclass
class Story:
    """Story of one recorded device: what it saw and did."""

    orders: list[Any] = field(default_factory=list)
    receipts: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # receipts for the same updates, sent a second time
    served: list[dict[str, np.ndarray]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)


def live(peer: Peer) -> Story:
    """Live a device's whole life: add 1 to every served number, and evaluate without changes."""
    story = Story()
    while (heard := peer.next())[0] != "welcome":
        assert heard[0] == "notice" and heard[1].text
    story.plan = json.loads(heard[1].plan_json)
    for order in peer.orders():
        story.orders.append(order)
        if order.work == peer.contract.value("Work.WORK_EVALUATE"):
            metrics = {"accuracy_before": 0.5, "accuracy_common": 0.25, "kept": "personalized", "test_samples": 5}
            story.receipts.append(peer.submit(order, [], metrics))
            continue
        peer.progress(order)
        [ref] = order.downloads
        story.served.append(peer.download(ref))
        [wanted] = order.returns
        trained = {name: tensor + np.float32(1) for name, tensor in story.served[-1].items()}
        parts = [peer.upload(order, wanted.part, trained, ref.version)]
        story.receipts.append(peer.submit(order, parts, METRICS))
        story.again.append(peer.submit(order, parts, METRICS))  # as after a lost receipt
    return story


@pytest.fixture(scope="module")
def stories(federation: Federation) -> dict[str, Story]:
    flags = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", str(ROUNDS))
    server = federation.server(*flags)
    peers = {name: Peer(server.port, server.join_token, name) for name in ("ada", "bob")}
    try:
        peers["ada"].connect()
        server.wait_for(" ada connected")
        peers["bob"].connect()
        with ThreadPoolExecutor(len(peers)) as pool:
            return dict(zip(peers, pool.map(live, peers.values()), strict=True))
    finally:
        for peer in peers.values():
            peer.close()


def test_it_is_enrolled_under_its_name_and_told_the_plan(stories: dict[str, Story]) -> None:
    plan = stories["ada"].plan
    assert plan == stories["bob"].plan
    assert (plan["method"], plan["model"]["name"], plan["classes"]) == ("fedavg", "mlr", [0, 1])


def test_it_is_given_every_order_and_every_answer_counts(stories: dict[str, Story]) -> None:
    for name, story in stories.items():
        assert [order.id for order in story.orders] == [f"{work}-{n}-{name}" for n in (1, 2) for work in ("train", "evaluate")]
        assert [ref.version for order in story.orders for ref in order.downloads] == [0, 1, 1, 2]
        assert [each.part for each in story.orders[0].returns] == ["shared"]
        assert story.receipts == [ACCEPTED] * 2 * ROUNDS
        assert len(story.again) == ROUNDS and set(story.again) <= {ACCEPTED, LATE}, "late: the round has closed meanwhile"


def test_what_it_trained_is_the_federations_state(stories: dict[str, Story], federation: Federation) -> None:
    first, second = stories["ada"].served
    final = load(federation.export()["shared.safetensors"])
    for name, tensor in first.items():
        np.testing.assert_allclose(second[name], tensor + 1, rtol=0, atol=1e-6)
        np.testing.assert_allclose(final[name], tensor + ROUNDS, rtol=0, atol=1e-6)


def test_what_it_measured_is_stored(stories: dict[str, Story], federation: Federation) -> None:
    rows = list(csv.DictReader(federation.export()["metrics.csv"].decode().splitlines()))
    trained = [row for row in rows if row["work"] == "train"]
    assert len(trained) == ROUNDS * len(stories)
    assert all({key: float(row[key]) for key in METRICS} == METRICS for row in trained)
    assert {row["kept"] for row in rows if row["work"] == "evaluate"} == {"personalized"}
