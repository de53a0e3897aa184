"""An attacker that adapts: the size and direction of wrong changes that cost the honest devices the most, for each rule.

`python -m benchmarks.liars --out benchmarks/results/liars.csv` sweeps all attacks with seed 0; then `--worst` measures the
costliest one of each method, rule and share with all seeds. All liars act together, and know what the server does. A row is the
mean accuracy of the honest devices after the last round, and that of the same devices without liars and bounds. Rows that a
file has already are not measured again. docs/security.md has the tables.
"""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import click
import msgspec
import numpy as np
import torch

from attune.common.plan import Profile
from attune.common.seeds import derive
from attune.fedclient.data.shard import Shard
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.learner import Learner
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.samples import Dataset
from benchmarks.bounded import SPLITS
from benchmarks.robust import OFF, RULES, Attack, Data, Tensors, cut, run

FLIP, JOINT, BACK, DRIFT, RANDOM, CLAIM = "flip", "joint", "back", "drift", "random", "claim"
SIZES: Mapping[str, tuple[float, ...]] = {  # in norms of the liar's own honest change; an honest fleet is bounded at 3
    FLIP: (1.0, 1.5, 2.0, 2.4, 2.9),
    JOINT: (1.0, 2.0, 2.9),
    BACK: (0.5, 1.0, 2.0, 2.9),
    DRIFT: (1.0, 2.9),
    RANDOM: (2.9,),
    CLAIM: (1.0,),
}
SWEPT = tuple(f"{kind}:{size:g}" for kind, sizes in SIZES.items() for size in sizes)
MANY = 40  # devices for which the digits alone are too few
CLAIMED = 100  # times its samples that a liar claims
MORE_RULES: Mapping[str, Mapping[str, Any]] = {  # of FedAvg, beside those of benchmarks.robust
    "bound 1.5": {"method.bound_change": 1.5},
    "bound 1, uniform": {"method.bound_change": 1.0, "method.uniform": True},
    "median": {"method.robust": "median"},
    "trimmed-mean": {"method.robust": "trimmed-mean", "method.attackers": 0.3},
    "multi-krum": {"method.robust": "multi-krum", "method.attackers": 0.3},
}
KEY = ("split", "method", "devices", "cohort", "rounds", "rule", "attack", "size", "share", "seed")
COLUMNS = (*KEY, "honest", "accuracy", "clean", "lost_points", "seconds")
Key = tuple[str, ...]


@dataclass(frozen=True)
class Lie(Attack):
    """Behaviour of liars that agree on a direction.

    - flip: against the liar's own honest change;
    - joint: against the mean of the liars' honest changes in the round before, the same for all;
    - back: towards the values of the first round (of changes: as flip);
    - drift: one drawn direction, the same for all liars and rounds, so that small steps add up;
    - random: a drawn direction for each liar and round; among so many numbers it is nearly orthogonal to all changes;
    - claim: as flip, with CLAIMED times the samples.

    Attributes:
        size: Norm of the wrong change, in norms of the liar's own honest change.
        memory: Changes and first values that the liars keep.
    """

    size: float = 1.0
    memory: dict[tuple[str, object], list[torch.Tensor]] = field(default_factory=dict)

    def values(self, learner: Learner, part: str, round_: int, served: Tensors, trained: Tensors) -> Tensors:
        names = [name for name, tensor in trained.items() if tensor.is_floating_point()]
        start_N, end_N = (torch.cat([of[name].double().reshape(-1) for name in names]) for of in (served, trained))
        wrong_N = start_N + self.change(learner.name, part, round_, start_N, end_N - start_N)
        pieces = dict(zip(names, wrong_N.split([trained[name].numel() for name in names]), strict=True))
        return {
            name: pieces[name].view(tensor.shape).to(tensor.dtype) if name in pieces else tensor
            for name, tensor in trained.items()
        }

    def change(self, name: str, part: str, round_: int, served_N: torch.Tensor, own_N: torch.Tensor) -> torch.Tensor:
        """Return a liar's change of all floating numbers of a part, instead of its own honest change."""
        towards_N = -own_N
        if self.kind == JOINT:
            self.memory.setdefault((part, round_), []).append(own_N)
            if before := self.memory.get((part, round_ - 1)):
                towards_N = -torch.stack(before).mean(0)
        elif self.kind == BACK:
            first_N = self.memory.setdefault((part, "first"), [served_N])[0]
            towards_N = first_N - served_N if (first_N != served_N).any() else -own_N
        elif self.kind in (DRIFT, RANDOM):
            drawn_by = (part,) if self.kind == DRIFT else (part, name, round_)
            draw = torch.Generator().manual_seed(derive(0, *drawn_by))
            towards_N = torch.randn(own_N.shape, generator=draw, dtype=torch.float64)
        return towards_N * (self.size * float(own_N.norm()) / max(float(towards_N.norm()), 1e-300))

    @contextmanager
    def under_way(self) -> Iterator[None]:
        times = dict.fromkeys(self.devices, CLAIMED) if self.kind == CLAIM else {}
        profile, begun = Shard.profile, Learner._begun

        def declared(shard: Shard) -> Profile:  # the server compares an update's number with the one at the start
            honest = profile(shard)
            return msgspec.structs.replace(honest, samples=times.get(shard.name, 1) * honest.samples)

        def claimed(learner: Learner, *rest: Any) -> OrderResult:
            result = begun(learner, *rest)
            return msgspec.structs.replace(result, samples=times.get(learner.name, 1) * result.samples)

        with super().under_way(), patch.object(Shard, "profile", declared), patch.object(Learner, "_begun", claimed):
            yield


def with_moved(images: Dataset) -> Dataset:
    """Return a data set with each image (N, H, W, C) also moved by a pixel to the left and to the right.

    Copies of a test image stay among the test images.
    """

    def moved(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
        return np.concatenate([padded[:, :, by : by + x.shape[2]] for by in range(3)])

    train_y, test_y = np.tile(images.train_y, 3), np.tile(images.test_y, 3)
    return replace(images, train_x=moved(images.train_x), train_y=train_y, test_x=moved(images.test_x), test_y=test_y)


def rules_of(method: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of each rule that is measured for a method."""
    own = {rule: RULES[method][rule] for rule in ("off", "default")}
    return {**own, **MORE_RULES} if method == "fedavg" else own


def worst(rows: Mapping[Key, float]) -> set[Key]:
    """Return the keys of the costliest lie of each federation, rule and share with seed 0. A claim of samples is no change."""
    found: dict[Key, Key] = {}
    for key in rows:
        of = dict(zip(KEY, key, strict=True))
        if of["attack"] in ("none", CLAIM) or of["seed"] != "0":
            continue
        group = tuple(of[name] for name in KEY if name not in ("attack", "size", "seed"))
        if group not in found or rows[key] > rows[found[group]]:
            found[group] = key
    return set(found.values())


def read(file: Path) -> dict[Key, dict[str, str]]:
    """Return the rows of a file by their keys."""
    if not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(lines)}


@click.command()
@click.option("--split", "splits", multiple=True, default=("dirichlet 1.0",), type=click.Choice([*SPLITS]))
@click.option("--method", "methods", multiple=True, default=tuple(RULES))
@click.option("--devices", "fleets", multiple=True, type=int, default=(20, 50))
@click.option("--cohort", default=0, help="Devices of a round; 0: all.")
@click.option("--rounds", default=20)
@click.option("--rule", "rules", multiple=True, default=("default",))
@click.option("--attack", "attacks", multiple=True, default=SWEPT, help="KIND:SIZE; none: the rule without liars.")
@click.option("--share", "shares", multiple=True, type=float, default=(0.2, 0.3), help="Share of liars.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,))
@click.option("--worst", "only_worst", is_flag=True, help="Of these attacks only the costliest with seed 0.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(
    splits: tuple[str, ...],
    methods: tuple[str, ...],
    fleets: tuple[int, ...],
    cohort: int,
    rounds: int,
    rules: tuple[str, ...],
    attacks: tuple[str, ...],
    shares: tuple[float, ...],
    seeds: tuple[int, ...],
    only_worst: bool,
    out: Path,
) -> None:
    """Append a row to --out as each federation ends."""
    logging.getLogger("fedserver").setLevel(logging.ERROR)  # otherwise there is a line for every bounded round
    rows = read(out)

    @cache
    def shards(split: str, devices: int, seed: int) -> Data:
        full = load_dataset("digits", seed)
        return cut(full if devices < MANY else with_moved(full), devices, SPLITS[split], seed)

    @cache
    def clean(split: str, method: str, devices: int, seed: int) -> Mapping[str, float]:
        none = Attack("none", frozenset(), devices)
        return run(shards(split, devices, seed), method, {**OFF, "round.clients": cohort}, none, rounds, seed)

    def measure(split: str, method: str, devices: int, rule: str, attack: str, share: float, seed: int) -> None:
        kind, _, size = attack.partition(":")
        key = tuple(map(str, (split, method, devices, cohort, rounds, rule, kind, size or "0", share, seed)))
        seed_0 = (*key[:-1], "0")
        if key in rows or (only_worst and seed_0 not in chosen):
            return
        data, begun = shards(split, devices, seed), time.monotonic()
        liars = data.attackers(share)
        settings = {**rules_of(method)[rule], "round.clients": cohort}
        found = run(data, method, settings, Lie(kind, liars, devices, float(size or 0)), rounds, seed)
        seconds = time.monotonic() - begun
        usual, honest = clean(split, method, devices, seed), sorted(found.keys() - liars)
        accuracy, without = (fmean(each[name] for name in honest) for each in (found, usual))
        figures = (len(honest), f"{accuracy:.4f}", f"{without:.4f}", f"{100 * (without - accuracy):.2f}", f"{seconds:.1f}")
        new = not out.exists()
        with out.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([*([COLUMNS] if new else []), (*key, *figures)])
        click.echo(" ".join(map(str, (*key, *figures))))

    chosen = worst({key: float(row["lost_points"]) for key, row in rows.items()})
    for seed in seeds:
        for split in splits:
            for method in methods:
                for devices in fleets:
                    for rule in rules:
                        for attack in attacks:
                            for share in shares if attack != "none" else (0.0,):
                                measure(split, method, devices, rule, attack, share, seed)


if __name__ == "__main__":
    main()
