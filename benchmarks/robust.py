"""Accuracy of honest devices under attack, with each robust rule: the table of docs/security.md.

`python -m benchmarks.robust --out benchmarks/results/robust.csv`, or, for a data set from a path, with `--data
fashion_mnist.npz --samples 3000 --share 0.2`. Federations are simulated with the whole code of both sides; an attacker is a
device that hands in something else, or has other labels, than it should. A row is the mean accuracy of the honest devices after
the last round, and that of the same devices without attackers. Rows that a file has already are not measured again.
"""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from attune import simulate
from attune.common.config import merge
from attune.common.exchange.messages import Order
from attune.common.seeds import derive
from attune.fedclient.work.learner import Learner
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.split import partition
from examples.demo import shorten

FLIP, MILD, NOISE, LABELS, REPLACEMENT = "sign-flip", "mild-flip", "noise", "label-flip", "replacement"
ATTACKS = (FLIP, MILD, NOISE, LABELS, REPLACEMENT)
FLIPPED_BY = {FLIP: 100.0, MILD: 1.0}  # the mild attack is no larger than an honest change, so no bound applies
OFF = {"method.bound_change": 0.0, "method.bound_samples": 0.0, "round.take_back": 0.0}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # FedTP generates projections of attention
    "fedavg": ("dnn", {}),
    "fedtp": ("vit", {"model": {"width": 16, "heads": 2, "depth": 1}, "train": {"local_epochs": 2, "batch_size": 16}}),
    "fedmcsa": ("dnn", {}),
}
VOTES = {name: {"method.robust": name} for name in ("clip", "median", "trimmed-mean", "multi-krum")}
RULES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fedavg": {"off": OFF, "default": {}, **VOTES},
    "fedtp": {"off": OFF, "default": {}, **VOTES},
    "fedmcsa": {"off": OFF, "default": {}, "cap+floor": {"method.attention_cap": 0.1, "method.self_floor": 0.5}},
}
COLUMNS = (
    "data",
    "method",
    "rule",
    "attack",
    "share",
    "honest",
    "accuracy",
    "clean",
    "lost_points",
    "rounds",
    "seed",
    "seconds",
)
KEY = COLUMNS[:5]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Attack:
    """Behaviour of the attackers."""

    kind: str
    devices: frozenset[str]
    all_devices: int

    def labels(self, y: np.ndarray, classes: int) -> np.ndarray:
        """Return an attacker's training labels, for classes 0 .. `classes` - 1."""
        return classes - 1 - y if self.kind in (LABELS, REPLACEMENT) else y

    def tensor(self, before: torch.Tensor, trained: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """Return the values that an attacker hands in for a tensor."""
        if not trained.is_floating_point() or self.kind == LABELS:
            return trained
        if self.kind == NOISE:
            return torch.randn(trained.shape, generator=draw)
        times = -FLIPPED_BY[self.kind] if self.kind in FLIPPED_BY else float(self.all_devices)
        return before + times * (trained - before)

    def values(self, learner: Learner, part: str, round_: int, served: Tensors, trained: Tensors) -> Tensors:
        """Return what an attacker hands in for a part.

        Args:
            learner: The attacker's device.
            part: Name of the part.
            round_: The round.
            served: Values from which an honest change is counted; zeros where devices hand in changes.
            trained: Values that an honest device would hand in.
        """
        draw = torch.Generator().manual_seed(derive(0, learner.name, part, round_))
        return {name: self.tensor(served[name], tensor, draw) for name, tensor in trained.items()}

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Make the attackers' devices hand in the values of this attack during the block."""
        honest: Callable[..., Any] = Learner._written

        def written(learner: Learner, part: str, values: Tensors, before: Tensors | None, order: Order, *rest: Any) -> Any:
            if learner.name not in self.devices:
                return honest(learner, part, values, before, order, *rest)
            round_ = learner.newest.round if learner.newest else 0
            served = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
            served |= {} if learner.returns[part] == "change" else before or {}
            return honest(learner, part, self.values(learner, part, round_, served, values), before, order, *rest)

        with patch.object(Learner, "_written", written):
            yield


@dataclass(frozen=True)
class Data:
    """Arrays (train_x, train_y, test_x, test_y) of each device, by its name; labels are 0 .. classes - 1."""

    name: str
    classes: int
    devices: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]

    def attackers(self, share: float) -> frozenset[str]:
        return frozenset(sorted(self.devices)[len(self.devices) - round(share * len(self.devices)) :])


def cut(full: Dataset, devices: int, split: Mapping[str, Any], seed: int) -> Data:
    """Cut a data set for devices, with `alpha` of a Dirichlet split, or by the `classes_per_client`."""
    parts = partition(full, "dirichlet" if "alpha" in split else "pathological", devices, seed, **split)
    found = {f"device{n:02}": (*parts.arrays(n, "train"), *parts.arrays(n, "test")) for n in range(devices)}
    return Data(full.name, len(full.classes), found)


def run(data: Data, method: str, settings: Mapping[str, Any], attack: Attack, rounds: int, seed: int) -> dict[str, float]:
    """Return the accuracy of each device's model that the method leads to, after the last round."""
    shards = {
        name: (x, attack.labels(y, data.classes) if name in attack.devices else y, test_x, test_y)
        for name, (x, y, test_x, test_y) in data.devices.items()
    }
    model, options = MODELS[method]
    with attack.under_way():
        given = {**merge({"train": {"local_epochs": 5}}, options), **settings}
        result = simulate(shards, method, model, rounds, seed, given, executor="stacked", progress=False)
    return {client["name"]: client["accuracy"] for client in result.status["clients"] if client["accuracy"] is not None}


@click.command()
@click.option("--data", default="digits", help="digits, or a file as for `fedclient partition --dataset`.")
@click.option("--samples", default=0, help="Training samples drawn from it, and a third as many for testing; 0: all.")
@click.option("--devices", default=10)
@click.option("--alpha", default=1.0, help="Parameter of the Dirichlet cut.")
@click.option("--rounds", default=20)
@click.option("--seed", default=0)
@click.option("--share", "shares", multiple=True, type=float, default=(0.1, 0.2, 0.4), help="Share of attackers.")
@click.option("--method", "methods", multiple=True, default=tuple(RULES))
@click.option("--rule", "rules", multiple=True, help="Only these rules.")
@click.option("--attack", "attacks", multiple=True, default=ATTACKS)
@click.option("--set", "assignments", multiple=True, metavar="A.B=NUMBER", help="A setting for all runs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(
    data: str,
    samples: int,
    devices: int,
    alpha: float,
    rounds: int,
    seed: int,
    shares: tuple[float, ...],
    methods: tuple[str, ...],
    rules: tuple[str, ...],
    attacks: tuple[str, ...],
    assignments: tuple[str, ...],
    out: Path,
) -> None:
    """Append a row to --out as each federation ends."""
    logging.getLogger("fedserver").setLevel(logging.ERROR)  # otherwise there is a line for every bounded round
    full = load_dataset(data, seed)
    cuts = cut(shorten(full, samples, seed) if samples else full, devices, {"alpha": alpha}, seed)
    given = {name: float(value) for name, _, value in (text.partition("=") for text in assignments)}
    done = set()
    if out.exists():
        with out.open(newline="", encoding="utf-8") as file:
            done = {tuple(row[name] for name in KEY) for row in csv.DictReader(file)}
    clean: dict[tuple[str, str], dict[str, float]] = {}

    def measure(method: str, rule: str, attack: str, share: float) -> None:
        key = (cuts.name, method, rule, attack, str(share))
        begun, attackers = time.monotonic(), cuts.attackers(share)
        if key in done and (attack != "none" or rule != "off"):
            return
        settings = {**RULES[method][rule], **given}
        found = run(cuts, method, settings, Attack(attack, attackers, devices), rounds, seed)
        clean.setdefault((method, rule), found)
        usual = clean[method, "off"]
        honest = sorted(found.keys() - attackers)
        accuracy, without = (fmean(each[name] for name in honest) for each in (found, usual))
        if key in done:
            return
        lost, seconds = 100 * (without - accuracy), time.monotonic() - begun
        figures = (len(honest), f"{accuracy:.4f}", f"{without:.4f}", f"{lost:.1f}", rounds, seed, f"{seconds:.1f}")
        new = not out.exists()
        with out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS] if new else [])
            writer.writerow((*key, *figures))
        click.echo(" ".join(map(str, (*key, *figures))))

    for method in methods:
        chosen = [rule for rule in RULES[method] if not rules or rule in rules or rule == "off"]
        for rule in chosen:
            measure(method, rule, "none", 0.0)
        for share in shares:
            for attack in attacks:
                for rule in chosen:
                    if not rules or rule in rules:
                        measure(method, rule, attack, share)


if __name__ == "__main__":
    main()
