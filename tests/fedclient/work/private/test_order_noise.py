"""Noise of a device's orders: its variance, and what it is a function of."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attune.common.exchange.messages import Order
from attune.common.plan import Profile
from attune.fedclient.work.private.lattice import DEVIATION, LatticeStream
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.order_noise import OrderNoise
from attune.fedclient.work.private.private_learning import PrivateLearning
from attune.fedserver.core.planning import make_plan, resolve

COUNT, SAMPLES = 100_000, 60
APART = 5 / math.sqrt(COUNT)  # correlation that independent numbers hardly ever have
SETTINGS = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}, "privacy": {"unit": "example", "noise": 2.0}}
VALUE = {"w": torch.zeros(3)}


def noise_of(
    root: Path,
    device: str = "a",
    order: str = "train-1-a",
    round_: int = 1,
    value: float = 0.0,
    run: str = "",
    data: str = "",
    metrics: bool = False,
) -> OrderNoise:
    """Return the noise of an order, by a device that has just started. `data`: the device whose data it has, too."""
    plan = make_plan(resolve(SETTINGS), {device: Profile("tabular", (6,), [0, 1], SAMPLES, 20)}, "f", run)
    ledger = PrivacyLedger.of_data(root / "privacy", root / device, f"sha256:{data or device}", False)
    learning = PrivateLearning(plan, ledger, SAMPLES, None, metrics=metrics, name=device)
    served = {"w": VALUE["w"] + value}
    return learning.order_noise(Order(id=order, round=round_, work="train"), served, served, 0)


def drawn(noise: OrderNoise, count: int = COUNT) -> npt.NDArray[np.float64]:
    """Return the noise of an order's steps, in deviations."""
    return LatticeStream(noise.stream("noise")).numbers(count).numpy() / DEVIATION


def test_noise_is_independent_between_rounds_devices_attempts_and_runs(tmp_path: Path) -> None:
    orders = {
        "the order": noise_of(tmp_path),
        "the next round": noise_of(tmp_path, order="train-2-a", round_=2),
        "another device": noise_of(tmp_path, device="b", order="train-1-b"),
        "another device, the same order": noise_of(tmp_path, device="c"),
        "another attempt at the order": noise_of(tmp_path, order="train-1-a.2"),
        "the same order from another value": noise_of(tmp_path, value=1e-6),
        "another run": noise_of(tmp_path, run="second"),
        "the same order in another round": noise_of(tmp_path, round_=2),  # of another learning rate, and other dropout
        "a device with the same data": noise_of(tmp_path, device="d", data="a"),
        "other noise, as metrics take their share": noise_of(tmp_path, metrics=True),
    }
    numbers = {name: drawn(noise) for name, noise in orders.items()}
    for z in numbers.values():
        assert z.var() == pytest.approx(1, abs=5 * math.sqrt(2 / COUNT))
        assert abs(z.mean()) < APART
    for one, other in itertools.combinations(numbers, 2):
        assert abs(np.corrcoef(numbers[one], numbers[other])[0, 1]) < APART, (one, other)


def test_draws_of_batches_are_independent_of_one_another_and_of_the_noise(tmp_path: Path) -> None:
    orders = (noise_of(tmp_path), noise_of(tmp_path, order="train-2-a", round_=2), noise_of(tmp_path, device="b"))
    there = []
    for noise in orders:
        steps = noise.charged
        mask = torch.zeros(steps, SAMPLES, dtype=torch.float64)
        for step, index_B in enumerate(noise.batches(SAMPLES, 30, steps, "")):
            mask[step, index_B] = 1
        there += [mask.flatten().numpy(), drawn(noise, mask.numel())]
    for one, other in itertools.combinations(there, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(len(one))


def test_a_device_that_starts_again_repeats_noise_and_batches_of_the_same_inputs(tmp_path: Path) -> None:
    first, again = noise_of(tmp_path), noise_of(tmp_path)
    assert np.array_equal(drawn(first), drawn(again))
    batches = [[index_B.tolist() for index_B in noise.batches(SAMPLES, 30, 5, "")] for noise in (first, again)]
    assert batches[0] == batches[1]
