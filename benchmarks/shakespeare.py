"""Next characters of Shakespeare's roles by the causal and by the leaky Transformer: why FedTP printed 84.40 % (E3).

`python -m benchmarks.shakespeare --data PATH/roles.tsv.gz --out benchmarks/results` takes six minutes on one core. It is FedAvg
in one process: the devices' trainer and the server's mean, without the network between them.
"""

from __future__ import annotations

import csv
import gzip
import json
import string
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from msgspec.structs import asdict, replace
from torch import Tensor

from attune.common.config import TrainSettings
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.common.methods.settings.objectives import SgdSettings
from attune.common.methods.settings.predictors import ModelSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import components, tensors_of
from attune.common.seeds import derive
from attune.fedclient.work.job import alone
from attune.fedclient.work.objectives.sgd import Sgd
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import Trainer
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import VALUE, Mean
from benchmarks.machine import machine

ALPHABET = string.printable
BATCHES = {5: 64, 80: 8}  # windows of a mini-batch, by the length of a window
TRAIN_SHARE = 0.8  # share of a role's text, from its beginning
PAPER_WINDOW, PAPER_ACCURACY = 5, 84.40
MODEL = {"width": 64, "depth": 2, "heads": 8}
TRAIN = TrainSettings(lr=0.3, momentum=0.9, local_epochs=5, clip_norm=1.0)
COLUMNS = ("window", "targets", "accuracy", "label_in_input", "last_position", "leak_predicts", "loss", "cpu_s")

Pair = tuple[Tensor, Tensor]  # x (N, T), y (N, T)


@dataclass(frozen=True)
class Role:
    """Windows of one client."""

    train: Pair
    test: Pair


def texts(path: Path, least: int) -> dict[str, str]:
    """Return the text of each role with at least so many characters, one line below the other. `path` is roles.tsv.gz."""
    lines: dict[str, list[str]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="ascii", newline="\n") as file:
        for row in file.read().splitlines()[1:]:
            number, play, name, line = row.split("\t")
            lines[f"{number} {name}, {play}"].append(line)
    whole = {role: "\n".join(said) for role, said in lines.items()}
    return {role: text for role, text in whole.items() if len(text) >= least}


def cut(text: str, window: int) -> Pair:
    """Return adjacent windows, and the same windows one character later: position t predicts the character at t + 1."""
    codes = torch.tensor([ALPHABET.index(letter) for letter in text])
    count = (len(codes) - 1) // window
    return codes[: count * window].view(count, window), codes[1 : count * window + 1].view(count, window)


def in_time(text: str, window: int) -> Role:
    """Split a role in time: the first part for training, the rest for testing. No window crosses the border."""
    border = int(TRAIN_SHARE * len(text))
    return Role(cut(text[:border], window), cut(text[border:], window))


def federation(roles: dict[str, Role], window: int, leaky: bool, rounds: int, share: float, seed: int) -> dict[str, Any]:
    """Run FedAvg over `rounds`. Return the common model's percentages of right positions on all test windows."""
    started = time.process_time()
    spec = default_spec(
        "tokens", (window,), len(ALPHABET), len(ALPHABET), "transformer", MODEL | {"leaky_targets": leaky}, True
    )
    model = build(spec, seed)
    settings = replace(TRAIN, batch_size=BATCHES[window])
    device = Trainer(model, Sgd(SgdSettings()), PlainPredictor(ModelSettings()), settings, torch.device("cpu"))
    vault = MemoryVault()
    mean = Mean(MeanSettings(), vault, seed, components(model))
    mean.start({name: tensor.clone() for name, tensor in tensors_of(model).items()})
    draw = np.random.default_rng(derive(seed, "cohorts"))
    for number in range(1, rounds + 1):
        updates, losses = [], []
        for name in sorted(draw.choice(sorted(roles), max(1, round(share * len(roles))), replace=False).tolist()):
            x, y = roles[name].train
            served = vault.read(VALUE)
            trained = alone(device.training(served, served, x, y, partial(derive, seed, name, number)))
            updates.append(PartUpdate(name, float(len(x)), trained.tensors))
            losses.append(trained.loss)
        mean.close_round(updates)
    right_T = _right(device, vault, roles)
    return {
        "window": window,
        "targets": "leaky" if leaky else "causal",
        "accuracy": round(float(right_T.mean()), 2),
        "label_in_input": round(float(right_T[:-1].mean()), 2),
        "last_position": round(float(right_T[-1]), 2),
        "loss": round(float(np.mean(losses)), 4),
        "cpu_s": round(time.process_time() - started, 1),
    }


def _right(device: Trainer, vault: MemoryVault, roles: dict[str, Role]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the percentages on all roles' test windows by position, (T,)."""
    x, y = (torch.cat([role.test[part] for role in roles.values()]) for part in (0, 1))
    found = torch.cat([logits.argmax(-1) for _, logits in device.logits(vault.read(VALUE), x)])
    return 100 * (found == y).double().mean(dim=0).numpy()


def runs(path: Path, least: int, rounds: int, share: float, seed: int) -> Iterator[dict[str, Any]]:
    """Return a row for each window and each kind of targets.

    `leak_predicts` is the accuracy of a model that copies each label that the input contains, and is as good as the causal
    model at the last position, where the input has no label: (100 (T - 1) + causal accuracy there) / T.
    """
    said = texts(path, least)
    for window in BATCHES:
        roles = {name: in_time(text, window) for name, text in said.items()}
        causal = federation(roles, window, False, rounds, share, seed)
        yield causal
        predicted = (100 * (window - 1) + causal["last_position"]) / window
        yield federation(roles, window, True, rounds, share, seed) | {"leak_predicts": round(predicted, 2)}


def write(out: Path, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write shakespeare.csv and shakespeare.json."""
    with (out / "shakespeare.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "shakespeare.json").write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True, help="roles.tsv.gz.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A folder.")
@click.option("--least", type=click.IntRange(500), default=10_000, show_default=True, help="Fewest characters of a role.")
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True)
@click.option("--share", type=click.FloatRange(0, 1), default=0.03, show_default=True, help="Share of roles in each round.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(data: Path, out: Path, least: int, rounds: int, share: float, seed: int) -> None:
    """Train the four models on one thread, and write a row for each."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    about = {
        "what": "next characters, FedAvg on roles split in time; percentages of test positions",
        "command": f"python -m benchmarks.shakespeare {' '.join(sys.argv[1:])}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "roles": len(texts(data, least)),
        "model": MODEL,
        "train": {name: asdict(TRAIN)[name] for name in ("lr", "momentum", "local_epochs", "clip_norm")},
        "rounds": rounds,
        "share_of_roles_a_round": share,
        "batch_sizes": BATCHES,
        "paper": {"window": PAPER_WINDOW, "accuracy": PAPER_ACCURACY},
    }
    for row in runs(data, least, rounds, share, seed):
        rows.append(row)
        click.echo(row)
        write(out, rows, about)


if __name__ == "__main__":
    main()
