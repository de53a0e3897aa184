"""Sharing across sizes of networks: do small devices gain from large ones, beyond FedAvg among devices of their own size?

    python -m benchmarks.across_sizes --data DIR --out benchmarks/results/across_sizes.csv

DIR has `fashion_mnist.npz`, `cifar10.npz` (`train_x`, `train_y`, `test_x`, `test_y`) and `uci_har.npz` (`x`, `y`, `subject`,
`segment`, `position`). A task has 12 devices with equally many samples; each second one has a quarter of the parameters. For
each way four settings are tried on validation parts of the training samples. Rounds and epochs of fine-tuning are read from
the same trials. The best by the mean over all devices is then measured on the test parts. Rows that are there are not measured
again. Accuracies are means over devices, in percent; seconds are of the processor.

- FedAvg within the size: McMahan et al., AISTATS 2017, in two groups.
- HeteroFL: Diao et al., ICLR 2021. A small network is the first rows and columns of the large one. Each number is the mean
  over the devices that have it. There are no masked losses and no scalers.
- fedtp-any: after MH-pFedHN (arXiv 2507.22330). Base rows are averaged as in FedAvg. The server adds a small step to each,
  which one hypernetwork over both sizes makes from the device's embedding.
- FedProto: Tan et al., AAAI 2022. Devices share only the mean features of each class, and pull their features towards them.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import attune
from benchmarks.result_file import Results

Network = dict[str, Tensor]  # the tensors of several devices of one size, stacked along the first axis
Networks = dict[str, Network]  # by size
Pull = Callable[[Tensor, Tensor], Tensor]  # from features and classes to what is added to the loss
Fleet = dict[str, "Half"]  # by size
Reading = tuple[int, str]  # rounds, and how devices predict: "head", "prototypes" or epochs of fine-tuning
Readings = dict[Reading, dict[str, float]]  # accuracies by size
Setting = Mapping[str, Any]
Arrays = tuple[np.ndarray, ...]  # x, y, test x, test y: an axis of devices first, channels last
DEVICES, FEATURES, BATCH, VALID = 12, 48, 20, 0.2
SIZES = {"small": (8, 16, 52), "large": (16, 32, 120)}  # channels of two convolutions, and hidden units
KERNELS = {1: (9, 5, 4), 2: (5, 3, 2)}  # of two convolutions and of the pooling, for series and images
TUNED = (1, 4, 10)  # epochs of fine-tuning at which a trial is read
COLUMNS = ("task", "way", "part", "seed", "setting", "rounds", "by", "small", "large", "seconds")


@dataclass(frozen=True)
class Half:
    """Devices of one size: inputs (devices, n, channels, ...) and classes (devices, n)."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def validation(self) -> Half:
        """Return the same devices with their last training samples in place of test samples."""
        kept = round(self.y.shape[1] * (1 - VALID))
        return Half(self.x[:, :kept], self.y[:, :kept], self.x[:, kept:], self.y[:, kept:])


@functools.lru_cache(4)
def _images(path: Path, seed: int, samples: int) -> Arrays:
    """Draw devices whose shares of classes are from Dirichlet(0.3). Train and test parts have the same shares."""
    data, draw = np.load(path), np.random.default_rng(seed)
    shares, parts = draw.dirichlet([0.3] * 10, DEVICES), []
    for part, count in (("train", samples), ("test", 200)):
        x, y = data[f"{part}_x"], data[f"{part}_y"]
        left = [list(draw.permutation(np.flatnonzero(y == label))) for label in range(10)]
        rows = np.stack([draw.permutation([left[c].pop() for c in draw.choice(10, count, p=share)]) for share in shares])
        images = x[rows].astype(np.float32) / 255
        parts += [images[..., None] if images.ndim == 4 else images, y[rows].astype(np.int64)]
    return tuple(parts)


@functools.lru_cache(4)
def _persons(path: Path, seed: int, samples: int) -> Arrays:
    """Draw persons. Windows do not overlap. Training, validation and test windows are from different segments."""
    data, draw = np.load(path), np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[], [], [], []]
    for person in draw.permutation(np.unique(data["subject"]))[:DEVICES]:
        mine = (data["subject"] == person) & (data["position"] % 2 == 0)
        for place, (test, count) in enumerate(((False, samples), (True, 72))):
            rows = draw.permutation(np.flatnonzero(mine & ((data["segment"] % 2 == 0) == test)))[:count]
            rows = rows[np.argsort(draw.permutation(data["segment"].max() + 1)[data["segment"][rows]], kind="stable")]
            parts[2 * place].append(data["x"][rows])
            parts[2 * place + 1].append(data["y"][rows].astype(np.int64))
    x, y, test_x, test_y = (np.stack(part) for part in parts)
    mean, scale = x.mean((0, 1, 2)), x.std((0, 1, 2))
    return (x - mean) / scale, y, (test_x - mean) / scale, test_y


@dataclass(frozen=True)
class Task:
    """Data set, how it is cut, and how long its networks train."""

    file: str
    draw: Callable[[Path, int, int], Arrays]
    samples: int
    classes: int
    epochs: int  # of a round
    rounds: tuple[int, ...]  # after which a trial is read
    trials: int  # seeds whose validation parts choose settings

    def fleet(self, data: Path, seed: int) -> Fleet:
        x, y, test_x, test_y = self.draw(data / self.file, seed, self.samples)
        if x.ndim == 5:
            x, test_x = (x - 0.5) / 0.3, (test_x - 0.5) / 0.3
        tensors = [torch.from_numpy(part) for part in (np.moveaxis(x, -1, 2), y, np.moveaxis(test_x, -1, 2), test_y)]
        return {size: Half(*(part[place::2].contiguous() for part in tensors)) for place, size in enumerate(SIZES)}


TASKS = {
    "fashion-mnist": Task("fashion_mnist.npz", _images, 100, 10, 2, (15, 30), 2),
    "cifar10": Task("cifar10.npz", _images, 200, 10, 2, (10, 20), 1),
    "uci-har": Task("uci_har.npz", _persons, 40, 6, 5, (15, 30), 2),
}


def initial(size: str, like: Tensor, classes: int, draw: torch.Generator) -> Network:
    """Draw the network of one device, with torch's usual bounds; the first axis has the length 1."""
    (one, two, hidden), (channels, *sides) = SIZES[size], like.shape[2:]
    first, second, pool = KERNELS[len(sides)]
    middle = int(np.prod([(((side - first) // 2 + 1) - second + 1) // pool for side in sides]))
    convolutions = (one, channels, *[first] * len(sides)), (two, one, *[second] * len(sides))
    dims = *convolutions, (hidden, two * middle), (FEATURES, hidden), (classes, FEATURES)
    network = {}
    for name, of in zip(("conv1", "conv2", "hidden", "features", "head"), dims, strict=True):
        for kind, shape in (("weight", of), ("bias", of[:1])):
            network[f"{name}.{kind}"] = ((2 * torch.rand(shape, generator=draw) - 1) * float(np.prod(of[1:])) ** -0.5)[None]
    return network


def forward(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (devices, n, 48) and scores (devices, n, classes)."""
    devices, count = x.shape[:2]
    convolve, pool = (functional.conv2d, functional.max_pool2d) if x.ndim == 5 else (functional.conv1d, functional.max_pool1d)

    def convolved(name: str, h: Tensor, stride: int) -> Tensor:
        weight, bias = network[f"{name}.weight"].flatten(0, 1), network[f"{name}.bias"].flatten()
        return torch.relu(convolve(h, weight, bias, stride=stride, groups=devices))

    def dense(name: str, h: Tensor) -> Tensor:
        return torch.baddbmm(network[f"{name}.bias"][:, None], h, network[f"{name}.weight"].mT)

    h = convolved("conv2", convolved("conv1", x.transpose(0, 1).flatten(1, 2), 2), 1)
    h = pool(h, KERNELS[x.ndim - 3][2]).reshape(count, devices, -1).transpose(0, 1)
    features = torch.relu(dense("features", torch.relu(dense("hidden", h))))
    return features, dense("head", features)


def trained(network: Network, half: Half, lr: float, epochs: int, pull: Pull | None = None) -> Network:
    """Return the networks after epochs of SGD with momentum 0.9 and batches of 20, each device on its own samples."""
    devices, count = half.y.shape
    now = {name: tensor.detach().clone().requires_grad_() for name, tensor in network.items()}
    optimiser = torch.optim.SGD(now.values(), lr, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.rand(devices, count).argsort(1).split(BATCH, 1):
            rows = torch.arange(devices)[:, None], batch
            features, scores = forward(now, half.x[rows])
            loss = devices * functional.cross_entropy(scores.flatten(0, 1), half.y[rows].flatten())
            optimiser.zero_grad()
            (loss + (pull(features, half.y[rows]) if pull else 0.0)).backward()
            optimiser.step()
    return {name: tensor.detach() for name, tensor in now.items()}


def corner(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the first rows and columns of stacked tensors, as many as another stack has; the first axis stays."""
    return tensor[tuple(slice(side) for side in (None, *like.shape[1:]))]


def nested_mean(small: Tensor, large: Tensor) -> Tensor:
    """Return the mean of each number over the devices that have it, with a first axis of the length 1."""
    total, count = large.sum(0, keepdim=True), torch.full_like(large[:1], len(large))
    corner(total, small).add_(small.sum(0, keepdim=True))
    corner(count, small).add_(len(small))
    return total / count


def prototypes(features: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean features of each class over the samples of all devices, and which classes have any."""
    members = functional.one_hot(y, classes).to(features.dtype)
    count = members.sum(0)
    return members.T @ features / count.clamp(min=1)[:, None], count > 0


class Alone:
    """Own networks, which nobody averages."""

    pull: Pull | None = None

    def __init__(self, nets: Networks, setting: Setting) -> None:
        self.setting = setting
        self.share(nets)

    def share(self, nets: Networks) -> None:
        self.nets = {
            size: {name: t.expand(DEVICES // 2, *t.shape[1:]) for name, t in network.items()} for size, network in nets.items()
        }

    def served(self) -> Networks:
        """Return the networks that devices train, or predict with."""
        return self.nets

    def close(self, nets: Networks, fleet: Fleet) -> None:
        """Take what the devices trained."""
        self.nets = nets

    def scores(self, network: Network, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names of predictors with their scores, without fine-tuning."""
        yield "head", forward(network, x)[1]


class Within(Alone):
    """FedAvg in two groups."""

    def close(self, nets: Networks, fleet: Fleet) -> None:
        self.share({size: {name: t.mean(0, keepdim=True) for name, t in network.items()} for size, network in nets.items()})


class Nested(Alone):
    """HeteroFL: the small network is a corner of the large one."""

    def share(self, nets: Networks) -> None:
        small = {name: corner(t, nets["small"][name]) for name, t in nets["large"].items()}
        super().share({"small": small, "large": nets["large"]})

    def close(self, nets: Networks, fleet: Fleet) -> None:
        self.share(nets | {"large": {name: nested_mean(nets["small"][name], t) for name, t in nets["large"].items()}})


class Generated(Alone):
    """fedtp-any: base rows, and small steps from a hypernetwork over both sizes.

    A step of a row is (u_i * e_r) A, with u_i from the device's embedding, e_r for each row of the large network, and A for
    each tensor; a small network takes the first rows and columns. A is zero at first, so the first round is FedAvg's.
    """

    def __init__(self, nets: Networks, setting: Setting) -> None:
        self.base = (Nested if setting["base"] == "shared" else Within)(nets, setting)
        self.large, width = nets["large"], 64
        self.embeddings = nn.Parameter(torch.randn(DEVICES, 32))
        self.body = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rows = {name: nn.Parameter(torch.randn(t.shape[1], width)) for name, t in self.large.items()}
        self.heads = {name: nn.Parameter(torch.zeros(width, t[0, 0].numel())) for name, t in self.large.items()}
        every = [self.embeddings, *self.body.parameters(), *self.rows.values(), *self.heads.values()]
        self.optimiser = torch.optim.Adam(every, setting["server_lr"])

    def steps(self) -> Networks:
        """Return the step of each device, in units of the layer's bound at the start."""
        u, steps = self.body(self.embeddings), {}
        for name, t in self.large.items():
            steps[name] = ((u[:, None] * self.rows[name]) @ self.heads[name] * t.abs().max()).reshape(-1, *t.shape[1:])
        both = enumerate(self.base.nets.items())
        return {size: {n: corner(steps[n][place::2], t) for n, t in network.items()} for place, (size, network) in both}

    @torch.no_grad()
    def served(self) -> Networks:
        steps = self.steps()
        return {size: {n: t + steps[size][n] for n, t in network.items()} for size, network in self.base.nets.items()}

    def close(self, nets: Networks, fleet: Fleet) -> None:
        """Move the base by the mean of the changes, and the hypernetwork along what is left of each."""
        before, old = self.served(), self.base.nets
        change = {size: {n: t - before[size][n] for n, t in network.items()} for size, network in nets.items()}
        self.base.close({size: {n: old[size][n] + t for n, t in c.items()} for size, c in change.items()}, fleet)
        new, steps = self.base.nets, self.steps()
        left = {(size, n): t - (new[size][n] - old[size][n]) for size, network in change.items() for n, t in network.items()}
        self.optimiser.zero_grad()
        torch.stack([-(steps[size][n] * t).sum() for (size, n), t in left.items()]).sum().backward()
        if self.optimiser.defaults["lr"]:  # 0 times what diverged is not 0
            self.optimiser.step()


class Prototypes(Alone):
    """FedProto: mean features of each class."""

    def close(self, nets: Networks, fleet: Fleet) -> None:
        super().close(nets, fleet)
        features = torch.cat([forward(nets[size], half.x)[0].flatten(0, 1) for size, half in fleet.items()])
        y = torch.cat([half.y.flatten() for half in fleet.values()])
        self.means, self.known = means, _ = prototypes(features, y, nets["small"]["head.bias"].shape[1])
        if weight := self.setting["lambda"]:
            self.pull = lambda features, y: weight * len(y) * functional.mse_loss(features, means[y])

    def scores(self, network: Network, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        features, scores = forward(network, x)
        yield "head", scores
        yield "prototypes", torch.where(self.known, -torch.cdist(features, self.means.expand(len(x), -1, -1)), -torch.inf)


RATES = [{"lr": lr} for lr in (0.01, 0.02, 0.05, 0.1)]
BASES = [{"lr": lr, "base": base, "server_lr": 1e-3} for lr in (0.02, 0.05) for base in ("shared", "size")]
PULLS = [{"lr": lr, "lambda": weight} for lr in (0.02, 0.05) for weight in (0.1, 1.0)]
WAYS: dict[str, tuple[type[Alone], bool, Sequence[Setting]]] = {  # class, whether devices fine-tune, settings
    "own network alone": (Alone, False, RATES),
    "FedAvg within the size, fine-tuned": (Within, True, RATES),
    "HeteroFL, fine-tuned": (Nested, True, RATES),
    "fedtp-any, fine-tuned": (Generated, True, BASES),
    "FedProto": (Prototypes, False, PULLS),
}
CONTROLS: dict[str, tuple[str, Setting]] = {  # way whose chosen setting is taken, and what is changed in it
    "FedProto without prototypes": ("FedProto", {"lambda": 0.0}),
    "fedtp-any without steps, fine-tuned": ("fedtp-any, fine-tuned", {"server_lr": 0.0}),
}


def federation(way: str, fleet: Fleet, task: Task, setting: Setting, seed: int, rounds: Sequence[int]) -> Readings:
    """Run a federation, and return the accuracy of each size at each reading after one of these rounds."""
    kind, fine_tuned, _ = WAYS[way]
    torch.manual_seed(seed)
    draw, lr = torch.Generator().manual_seed(seed), setting["lr"]
    run = kind({size: initial(size, half.x, task.classes, draw) for size, half in fleet.items()}, setting)
    made: Readings = {}
    for round_ in range(1, max(rounds) + 1):
        served = run.served()
        run.close({size: trained(served[size], half, lr, task.epochs, run.pull) for size, half in fleet.items()}, fleet)
        for size, half in fleet.items() if round_ in rounds else ():
            network, done = run.served()[size], 0
            readings = list(run.scores(network, half.test_x))
            for epochs in TUNED if fine_tuned else ():
                network, done = trained(network, half, lr, epochs - done), epochs
                readings.append((str(epochs), forward(network, half.test_x)[1]))
            for by, scores in readings:
                made.setdefault((round_, by), {})[size] = 100 * float((scores.argmax(2) == half.test_y).float().mean())
    return made


def trial(task: str, way: str, setting: Setting, data: Path) -> tuple[Reading, dict[str, float]]:
    """Try a setting on validation parts, and return its best reading."""
    of, seeds = TASKS[task], []
    for seed in range(of.trials):
        halves = {size: half.validation() for size, half in of.fleet(data, seed).items()}
        seeds.append(federation(way, halves, of, setting, seed, of.rounds))
    means = {reading: {size: fmean(one[reading][size] for one in seeds) for size in SIZES} for reading in seeds[0]}
    return max(means.items(), key=lambda item: sum(item[1].values()))


def without_networks(task: str, seed: int, data: Path) -> dict[str, dict[str, float]]:
    """Return the accuracies of the closed form, and of a constant answer: the most frequent class of the device."""
    of = TASKS[task]
    arrays = of.draw(data / of.file, seed, of.samples)
    shards = {f"{place:02}": tuple(part[place] for part in arrays) for place in range(DEVICES)}
    settings, table = {"data.classes": list(range(of.classes))}, {"standardise": "federation"} if arrays[0].ndim == 4 else {}
    result = attune.simulate(
        shards, "analytic", "closed-form", seed=seed, settings=settings, baseline="none", table=table, progress=False
    )
    closed = [client["accuracy"] for client in sorted(result.status["clients"], key=lambda client: client["name"])]
    constant = [float((test_y == np.bincount(y).argmax()).mean()) for y, test_y in zip(arrays[1], arrays[3], strict=True)]
    both = {"closed form": closed, "constant answer": constant}
    return {way: {size: 100 * fmean(scores[place::2]) for place, size in enumerate(SIZES)} for way, scores in both.items()}


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
def main(data: Path, out: Path, seeds: int) -> None:
    """Try and measure what the file lacks, one federation after the other."""
    torch.set_num_threads(1)
    results, started = Results(out, COLUMNS), time.process_time()

    def add(*cells: Any, scores: Mapping[str, float]) -> None:
        nonlocal started
        values = (*cells, *(round(scores[size], 2) for size in SIZES), round(time.process_time() - started, 1))
        results.add([dict(zip(COLUMNS, values, strict=True))])
        started = time.process_time()

    def rows(**cells: str) -> list[dict[str, str]]:
        return [row for row in results.rows() if cells.items() <= row.items()]

    for task in TASKS:
        for way, setting in [(way, setting) for way, (*_, settings) in WAYS.items() for setting in settings]:
            if not rows(task=task, way=way, part="validation", setting=json.dumps(setting)):
                reading, scores = trial(task, way, setting, data)
                add(task, way, "validation", "", json.dumps(setting), *reading, scores=scores)
        for seed in range(seeds):
            if not rows(task=task, way="closed form", seed=str(seed)):
                for way, scores in without_networks(task, seed, data).items():
                    add(task, way, "test", seed, "{}", "", "", scores=scores)
            for way in [way for way in (*WAYS, *CONTROLS) if not rows(task=task, way=way, seed=str(seed))]:
                tried, changed = CONTROLS.get(way, (way, {}))
                known = rows(task=task, way=tried, part="validation")
                chosen = max(known, key=lambda row: float(row["small"]) + float(row["large"]))
                setting = json.loads(chosen["setting"]) | changed
                reading = int(chosen["rounds"]), chosen["by"] if setting.get("lambda", 1) else "head"
                made = federation(tried, TASKS[task].fleet(data, seed), TASKS[task], setting, seed, reading[:1])
                add(task, way, "test", seed, json.dumps(setting), *reading, scores=made[reading])


if __name__ == "__main__":
    main()
