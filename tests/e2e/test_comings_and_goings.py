"""Devices that hang, join in the middle, come after the end, or hold data that do not fit: one small federation."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile
from tests.e2e.hand import Hand
from tests.e2e.harness import IN_TRAINING, Federation, FederationAt, Process, Server, tabular_shard

FLAGS = (
    *("--method", "fedavg", "--model", "mlr", "--rounds", "3", "--min-clients", "3"),
    *("--set", "round.quorum=2", "--set", "round.deadline_s=6", "--set", "round.grace_s=600", "--set", "train.local_epochs=1"),
    *("--set", "round.evaluate_each_last=0"),
)
DECLARED = Profile(kind="tabular", shape=(6,), labels=[0, 1, 2], samples=20, test_samples=5)


@dataclass
class Ended:
    """Finished federation. Three devices begin; one of them, a real process, stops in round 1; a newcomer joins the rest."""

    federation: Federation
    server: Server
    frozen: Process
    shards: dict[str, Path]
    notice: str = ""
    orders: dict[str, list[pb.Order]] = field(default_factory=dict)
    receipts: set[int] = field(default_factory=set)
    finishes: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def ended(federation_at: FederationAt, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("shards")
    shards = {name: tabular_shard(folder / name, seed) for seed, name in enumerate(("frozen", "late"))}
    federation = federation_at("comings")
    server = federation.server(*FLAGS)
    frozen = federation.device(shards["frozen"], fault=IN_TRAINING)
    server.wait_for(" frozen connected")
    hands = {name: Hand(server.port, server.join_token, name) for name in ("one", "two", "newcomer")}
    streams = {name: hands[name].connect(DECLARED) for name in ("one", "two")}
    server.wait_for(" round 1: train on 3 devices")
    frozen.signal(signal.SIGSTOP)
    story = Ended(federation, server, frozen, shards)
    streams["newcomer"] = hands["newcomer"].connect(DECLARED)
    story.notice = streams["newcomer"].next("notice").text
    for round_ in (1, 2, 3, "evaluation"):
        for name, stream in streams.items():
            if (round_, name) == (1, "newcomer"):
                continue
            order = stream.next("order")
            story.orders.setdefault(name, []).append(order)
            answer = (
                hands[name].answer(order)
                if order.returns
                else hands[name].submit(order.id, accuracy_before=0.25, test_samples=5)
            )
            story.receipts.add(answer.status)
    story.finishes = [stream.next("finish").message for stream in streams.values()]
    return story


def test_the_deadline_closes_a_round_that_has_its_quorum(ended):
    rows = ended.federation.metrics()
    assert [row["client"] for row in rows if (row["round"], row["work"]) == ("1", "train")] == ["one", "two"]
    assert ended.receipts == {pb.Receipt.STATUS_ACCEPTED}
    assert len(ended.finishes) == 3


def test_a_device_that_hangs_is_noticed(ended):
    """Stop a process whose kernel still answers; only the ping of HTTP/2 shows that it hangs."""
    ended.server.wait_for(" frozen disconnected")
    assert ended.federation.client("frozen")["state"] == "disconnected"


def test_a_newcomer_waits_for_the_next_round_and_is_one_of_all_then(ended):
    assert "round 1 is under way" in ended.notice
    train, evaluate = pb.WORK_TRAIN, pb.WORK_EVALUATE
    assert [(order.round, order.work) for order in ended.orders["newcomer"]] == [(2, train), (3, train), (3, evaluate)]
    assert [order.round for order in ended.orders["one"]] == [1, 2, 3, 3]
    assert ended.federation.client("newcomer")["accuracy"] == 0.25
    rows = ended.federation.metrics()
    assert [row["client"] for row in rows if (row["round"], row["work"]) == ("3", "train")] == ["newcomer", "one", "two"]


def test_who_comes_after_the_end_gets_a_model(ended):
    federation, before = ended.federation, ended.federation.status()
    assert before["state"] == "done"
    late = federation.device(ended.shards["late"])
    assert late.code() == 0, late.text
    assert (federation.model(ended.shards["late"]) / "model.safetensors").exists()
    entry = federation.client("late")
    assert (entry["samples"], entry["accuracy"] is not None) == (40, True)
    late.wait_for(rf"accuracy {entry['accuracy']:.3f}")
    assert (federation.status()["state"], federation.status()["round"]) == ("done", 3)


def test_who_was_frozen_and_comes_back_after_the_end_gets_a_model_too(ended):
    ended.frozen.kill()
    back = ended.federation.device(ended.shards["frozen"])
    assert back.code() == 0, back.text
    assert "enrolled" not in back.text
    assert ended.federation.client("frozen")["accuracy"] is not None


@pytest.mark.parametrize(
    ("name", "shard", "code", "said"),
    [
        ("wide", {"features": 7}, 9, ["wide", "(7,)", "(6,)"]),
        ("strange", {"classes": (0, 1, 7)}, 8, ["strange", "7"]),
    ],
)
def test_a_shard_that_does_not_fit_is_refused_with_its_own_exit_code(ended, tmp_path, name, shard, code, said):
    device = ended.federation.device(tabular_shard(tmp_path / name, 5, **shard))
    assert device.code() == code, device.text
    assert "Traceback" not in device.text
    last = device.text.splitlines()[-1]
    assert last.startswith("fedclient: ")
    assert all(word in last for word in said), last


def test_nothing_of_this_was_an_accident(ended):
    assert ended.server.stop() == 0
    assert "Traceback" not in ended.server.text, ended.server.text
