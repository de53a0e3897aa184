"""Two devices that know only the recorded version 1 take part in a federation of today's server, to its end."""

from __future__ import annotations

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.e2e.harness import Federation
from tests.protocol.peer import Peer

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
