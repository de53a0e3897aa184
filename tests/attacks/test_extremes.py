"""A hostile device among honest ones hands in extreme, but finite, values over the network."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.hand import Hand, moved
from tests.e2e.harness import Federation, FederationAt, until

NAMES = ("ada", "bob", "carl", "eve")
FLAGS = ("--method", "fedavg", "--model", "mlr", "--rounds", "9")


class Scene:
    """Four devices, of which Eve is hostile. `close` answers a round; `served` is the state at the start of the next one."""

    def __init__(self, federation: Federation, *flags: str) -> None:
        self.federation = federation
        self.server = federation.server(*FLAGS, "--min-clients", "4", *flags)
        self.hands = {name: Hand(self.server.port, self.server.join_token, name) for name in NAMES}
        self.streams = {name: hand.connect() for name, hand in self.hands.items()}
        self.next_round()

    def next_round(self) -> None:
        self.orders = {name: stream.next("order") for name, stream in self.streams.items()}
        self.served = self.hands["ada"].served(self.orders["ada"])["shared"]

    def close(self, change: dict[str, Any], samples: dict[str, int] | None = None, loss: float = 0.5) -> None:
        for name, order in self.orders.items():
            tensors = change[name](self.served) if callable(change[name]) else moved(self.served, change[name])
            part = self.hands[name].send(order.id, "shared", tensors)
            receipt = self.hands[name].submit(order.id, [part], (samples or {}).get(name, 20), loss=loss)
            assert receipt.status == receipt.STATUS_ACCEPTED
        self.next_round()

    @property
    def status(self) -> dict[str, Any]:
        return self.federation.status()


@pytest.fixture
def scene(federation_at: FederationAt) -> Callable[..., Scene]:
    return lambda *flags: Scene(federation_at("scene"), *flags)


def largest(tensors: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(tensor.astype(np.float64)).max()) for tensor in tensors.values())


def filled(value: float) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda served: {name: np.full_like(tensor, value) for name, tensor in served.items()}


def test_extreme_values_move_the_state_no_further_than_honest_ones(scene: Any) -> None:
    """Hand in 1e30, then the end of float32: accepted, bounded, and reported to the operator."""
    found = scene()
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.11, "eve": filled(1e30)})
    assert largest(found.served) < 2
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.11, "eve": filled(-3e38)})
    assert largest(found.served) < 2
    notes = {client["name"]: client["note"] for client in found.status["clients"]}
    assert "median norm" in notes["eve"]
    assert notes["ada"] is None
    assert "round 2: bounded against the cohort" in found.server.text


def test_where_devices_vote_an_extreme_has_no_vote_and_the_operator_hears_it(scene: Any) -> None:
    found = scene("--set", "method.robust=multi-krum")
    before = found.served
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.11, "eve": filled(-1e30)})
    for name in before:
        assert np.allclose(found.served[name] - before[name], 0.31 / 3, atol=1e-6)
    notes = {client["name"]: client["note"] for client in found.status["clients"]}
    assert "it had no vote" in notes["eve"]
    assert notes["ada"] is None


def test_a_state_on_which_losses_explode_is_taken_back(scene: Any) -> None:
    """Turn off the bounds: one device moves the state anywhere, and the next round's losses show it."""
    found = scene("--set", "method.bound_change=0")
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.1, "eve": 0.1}, loss=1.0)
    good = found.served
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.1, "eve": 1e6}, loss=1.0)
    assert largest(found.served) > 1e5
    found.close({"ada": 0.1, "bob": 0.1, "carl": 0.1, "eve": 0.1}, loss=1e9)
    assert all(np.array_equal(found.served[name], good[name]) for name in good)
    setback = until(lambda: found.status["setback"], "the status to say so")
    assert "round 3: the state after round 2 was taken back: the median of the devices' losses went from 1 to 1e+09" in setback
    assert "counts for nothing" in found.server.text
