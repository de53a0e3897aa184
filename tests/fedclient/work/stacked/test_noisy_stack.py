"""Training with noise of devices together against one by one: the same draws, the same noise, the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from attune.fedclient.work.private.noisy_steps import OrderNoise
from attune.fedclient.work.stacked.lockstep import Stacked
from tests.fedclient.work.stacked.conftest import Make
from tests.fedclient.work.stacked.test_training import compare, objective

PRIVATE = ("sgd", "proximal", "own-model", "alternating")


def noise(number: int) -> OrderNoise:
    """Return the noise of a device: the multiplier depends on its samples, so each has its own."""
    return OrderNoise(clip=0.4, noise=0.5 + number / 10, key=bytes([number]) * 32, charged=1000)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_same_numbers_as_by_itself(name: str, make: Make) -> None:
    way = {"momentum": 0.9, "weight_decay": 0.05, "local_epochs": 3}
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        devices = make(objective(name), dtype=dtype, **way)
        for device in devices:
            device.noise = noise
        assert compare(devices, tolerance) > 0.01


class Positions(nn.Module):
    """A layer that is called twice, for each of several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))).mean(dim=1))


class Chunks(nn.Module):
    """A layer that sees at most 17 samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([torch.tanh(self.body(some)) for some in x.split(17)]))


@pytest.mark.parametrize(
    ("model", "way"),
    [(Positions, {"shape": (3, 4)}), (Chunks, {"sizes": (60, 50, 40), "batch_size": 16})],
)
def test_layers_over_positions_and_over_some_samples_are_clipped_alike(
    model: type[nn.Module], way: dict[str, Any], make: Make
) -> None:
    devices = make(objective("sgd"), model, dtype=torch.float64, **way)
    for device in devices:
        device.noise = noise
    assert compare(devices, 1e-11) > 0.01


def test_a_sample_that_overflows_counts_as_zero_alike(make: Make) -> None:
    devices = make(objective("sgd"))
    for device in devices:
        device.noise = noise
    devices[1].x[0] = 3e38
    assert compare(devices, 2e-5) > 0.01


def test_models_with_other_tensors_and_groups_go_one_by_one_and_say_why(make: Make) -> None:
    layers = (nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    devices = make(objective("sgd"), lambda: nn.Sequential(*layers))
    grouped = make(objective("sgd"))
    for device in (*devices, *grouped):
        device.noise = noise
    for device in grouped:
        groups = torch.arange(len(device.x)) // 2
        device.noise = lambda number, groups=groups: OrderNoise(0.4, 0.5, bytes(32), 1000, groups)
    for some, reason in (
        (devices, "the gradient of 1.weight is computed sample by sample"),
        (grouped, "gradients are clipped by groups of samples"),
    ):
        stacked = Stacked()
        stacked.run([device.training() for device in some])
        assert stacked.reasons == [reason]
