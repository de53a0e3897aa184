"""Adapters on a real sentence encoder, with different text on each device: bytes of a round, the server's state, and accuracy.

`python -m benchmarks.adapters_text --data shakespeare/plays --out benchmarks/results/adapters_text.json`. The body is MiniLM
from a package (examples/minilm.py says which one, and what to install). The task is to tell from which of ten plays a speech
is. Each device has speeches of three plays. They become shards as a site's own files would: a CSV file, then `fedclient shard
--tokenizer`. Test speeches are from the last third of their play, so no scene is in both parts. The rates are not tuned.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import attune
from attune.common.models.registry import build
from attune.common.plan import ModelSpec
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.plays import lines_of_play
from benchmarks.adapters import sizes, state_bytes
from benchmarks.machine import machine
from examples import minilm

PLAYS, OWN = 10, 3
WORDS = 12  # words of the shortest speech that counts
TEST_SHARE = 1 / 3  # last share of each play, which is for testing
LENGTH = 32
RATES = {"head": 0.2, "lora": 0.1, "full": 0.02}
TUNED_EPOCHS = 5
Speeches = dict[str, tuple[list[str], list[str]]]  # speeches for training and for testing, by play


def speeches_of(data: Path) -> Speeches:
    """Return speeches of the plays that have most: runs of lines of one role with enough words, in the order of the play."""
    found: dict[str, list[str]] = {}
    for path in sorted(data.glob("*.txt")):
        lines = groupby(lines_of_play(path.read_text(encoding="ascii")), key=lambda said: said[0])
        speeches = [" ".join(line for _, line in speech) for _, speech in lines]
        found[path.stem] = [speech for speech in speeches if len(speech.split()) >= WORDS]
    largest = sorted(found, key=lambda play: -len(found[play]))[:PLAYS]
    cut = {play: len(found[play]) - round(len(found[play]) * TEST_SHARE) for play in largest}
    return {play: (found[play][: cut[play]], found[play][cut[play] :]) for play in sorted(largest)}


def write_tables(speeches: Speeches, out: Path, devices: int, counts: tuple[int, int], seed: int) -> Iterator[Path]:
    """Write a CSV file for each device: speech, play, split. No speech is on two devices.

    Args:
        speeches: Speeches of each play.
        out: Folder for the files.
        devices: Number of devices.
        counts: Numbers of speeches for training and for testing.
        seed: Seed of the draw.
    """
    draw, plays = np.random.default_rng(seed), list(speeches)
    left = {play: [draw.permutation(len(part)).tolist() for part in speeches[play]] for play in plays}
    for number in range(devices):
        own = draw.choice(PLAYS, OWN, replace=False)
        path = out / f"device{number:02}.csv"
        with path.open("w", newline="", encoding="ascii") as file:
            table = csv.writer(file)
            table.writerow(("speech", "play", "split"))
            for part, split in enumerate(("train", "test")):
                for play in (plays[own[at % OWN]] for at in range(counts[part])):
                    table.writerow((speeches[play][part][left[play][part].pop()], play, split))
        yield path


def make_shards(speeches: Speeches, out: Path, devices: int, counts: tuple[int, int], seed: int) -> list[Path]:
    """Make shards of these files, as `fedclient shard --text speech --label play --tokenizer ...` does."""
    out.mkdir()
    table, classes = ReadOptions.of("play"), ",".join(speeches)
    options = MakeOptions.of(table, "speech", LENGTH, "", False, classes, minilm.place())
    shards = []
    for path in write_tables(speeches, out, devices, counts, seed):
        shards.append(out / path.stem)
        make(path, options, shards[-1])
    return shards


def measure(kind: str, method: str, shards: Sequence[Path], rounds: int, seed: int, alone: bool) -> dict[str, Any]:
    """Measure one federation. With `alone`, also measure what each device reaches without the others."""
    home, began = Path(tempfile.mkdtemp(prefix="attune-adapters-text-")), time.process_time()
    settings: dict[str, Any] = {"train.lr": RATES[kind], "train.local_epochs": 2, "train.batch_size": 8}
    settings |= {"method.tune_epochs": TUNED_EPOCHS} if method == "fedavg+ft" else {}
    try:
        result = attune.simulate(
            list(shards), method, f"examples.minilm:{kind}", rounds, seed, settings, "local" if alone else None, home / "run",
            executor="sequential",
        )  # fmt: skip
        state = state_bytes(home / "run")
    finally:
        shutil.rmtree(home)
    clients = result.status["clients"]
    means = {
        name: round(sum(client[key] for client in clients) / len(clients), 4)
        for name, key in (("accuracy", "accuracy"), ("common", "accuracy_common"), ("local", "accuracy_local"))
        if all(client.get(key) is not None for client in clients)
    }
    return {
        "method": method,
        "model": kind,
        "seed": seed,
        "lr": RATES[kind],
        **means,
        "constant": round(sum(client["accuracy_constant"] for client in clients) / len(clients), 4),
        "bytes_a_device_and_round": round(result.bytes_moved / rounds / len(clients)),
        "server_state_bytes": state,
        "processor_s": round(time.process_time() - began, 1),
    }


def built(kind: str) -> nn.Module:
    return build(ModelSpec(f"examples.minilm:{kind}", "tokens", (LENGTH,), PLAYS, 1 << 15), 0)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Shakespeare's plays, a folder.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file; its runs are not repeated.")
@click.option("--devices", type=click.IntRange(2), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--samples", type=(int, int), default=(60, 60), show_default=True, help="Training and test samples of a device.")
@click.option("--run", "runs", type=(str, str, int), multiple=True, help="Method, model (head, lora, full), seed (repeat).")
def main(
    data: Path, out: Path, devices: int, rounds: int, samples: tuple[int, int], runs: Sequence[tuple[str, str, int]]
) -> None:
    """Run one federation for each --run."""
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    found |= {
        "machine": machine(),
        "sizes": sizes({kind: built(kind) for kind in RATES}),
        "devices": devices,
        "rounds": rounds,
        "samples": samples,
        "length": LENGTH,
    }
    speeches = speeches_of(data)
    found["plays"] = {play: [len(part) for part in parts] for play, parts in speeches.items()}
    for method, kind, seed in runs:
        if any((row["method"], row["model"], row["seed"]) == (method, kind, seed) for row in found["rows"]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            shards = make_shards(speeches, Path(folder) / "shards", devices, samples, seed)
            found["rows"].append(measure(kind, method, shards, rounds, seed, alone=method == "fedavg+ft" and kind != "full"))
        click.echo(found["rows"][-1])
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
