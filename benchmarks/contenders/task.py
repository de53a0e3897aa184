"""The task: FedAvg of a linear model over devices that all train in every round. It needs only numpy and torch.

Every contender draws batches from one shuffled epoch after the other, and prints a line when each of its rounds ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

FEATURES, CLASSES, SAMPLES, TEST = 60, 10, 150, 50
STEPS, BATCH, RATE = 20, 20, 0.1
Devices = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # train x, train y, test x, test y


def write(path: Path, devices: int) -> None:
    """Write a linear rule with ten classes, and samples of it for each device."""
    draw = np.random.default_rng(0)
    rule = draw.normal(size=(FEATURES, CLASSES))
    x = draw.normal(size=(devices, SAMPLES + TEST, FEATURES)).astype(np.float32)
    np.savez(path, x=x, y=(x @ rule).argmax(axis=2))


def arrays(path: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Return train x, train y, test x and test y of each device."""
    with np.load(path) as found:
        x, y = found["x"], found["y"]
    return [(x[n, :SAMPLES], y[n, :SAMPLES], x[n, SAMPLES:], y[n, SAMPLES:]) for n in range(len(x))]


def tensors(path: Path) -> Devices:
    return [tuple(torch.from_numpy(each) for each in device) for device in arrays(path)]  # type: ignore[misc]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def batches(samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of each step's batch."""
    taken = 0
    while True:
        for some in torch.randperm(samples, generator=generator).split(BATCH):
            if taken == STEPS:
                return
            taken += 1
            yield some


def train(net: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    """Carry out the local steps of one device in one round, in place."""
    optimiser = torch.optim.SGD(net.parameters(), RATE)
    for some in batches(len(x), torch.Generator().manual_seed(seed)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[some]), y[some]).backward()
        optimiser.step()


def accuracy(weights: Mapping[str, Tensor], devices: Devices) -> float:
    """Return the accuracy of the common model over all devices' test samples."""
    net = model()
    net.load_state_dict(dict(weights))
    with torch.no_grad():
        return float(torch.cat([net(x).argmax(1) == y for _, _, x, y in devices]).double().mean())


def say_round() -> None:
    """Print that a round is over."""
    print("round", flush=True)


def say_accuracy(found: float) -> None:
    print(json.dumps({"accuracy": found}), flush=True)


def given() -> tuple[Path, int]:
    """Return the data and the number of rounds from the command line."""
    torch.set_num_threads(1)
    return Path(sys.argv[1]), int(sys.argv[2])
