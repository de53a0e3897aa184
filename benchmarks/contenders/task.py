"""The tasks: FedAvg of a linear model or a small CNN over devices that all train in every round, by numpy and torch alone.

Every contender draws batches from one shuffled epoch after the other, and prints a line when each of its rounds ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CLASSES, SAMPLES, TEST = 10, 150, 50
SHAPES = {"linear": (60,), "cnn": (1, 8, 8)}  # shape of a sample of each task
STRENGTH = 0.4  # standard deviation of a pattern's values; that of the noise is 1
CHANNELS = 8, 16  # of the CNN's two convolutions
STEPS, BATCH, RATE = 20, 20, 0.1
Devices = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # train x, train y, test x, test y


def write(path: Path, devices: int, shape: tuple[int, ...]) -> None:
    """Write samples (devices, SAMPLES + TEST, *shape) for each device: a pattern for each of ten classes, in noise."""
    draw = np.random.default_rng(0)
    patterns = STRENGTH * draw.normal(size=(CLASSES, *shape))
    y = draw.integers(CLASSES, size=(devices, SAMPLES + TEST))
    np.savez(path, x=(patterns[y] + draw.normal(size=(*y.shape, *shape))).astype(np.float32), y=y)


def arrays(path: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Return train x, train y, test x and test y of each device."""
    with np.load(path) as found:
        x, y = found["x"], found["y"]
    return [(x[n, :SAMPLES], y[n, :SAMPLES], x[n, SAMPLES:], y[n, SAMPLES:]) for n in range(len(x))]


def tensors(path: Path) -> Devices:
    return [tuple(torch.from_numpy(each) for each in device) for device in arrays(path)]  # type: ignore[misc]


def model(shape: Sequence[int]) -> nn.Module:
    """Return the network for samples of this shape: a linear layer, or two convolutions with poolings and a linear layer."""
    torch.manual_seed(0)
    if len(shape) == 1:
        return nn.Linear(shape[0], CLASSES)
    first, second = CHANNELS
    layers: list[nn.Module] = []
    for before, after in ((shape[0], first), (first, second)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(second * (shape[1] // 4) * (shape[2] // 4), CLASSES))


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
    net = model(devices[0][0].shape[1:])
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
