"""FedTP with the embeddings on the devices beside plain FedTP: accuracy and bytes, plain and under secure aggregation.

`python -m benchmarks.device_embedding --out benchmarks/results/device_embedding.csv` runs digits (10 devices, Dirichlet 0.3).
With `--data shakespeare/plays` it runs LoRA on MiniLM instead (examples/minilm.py says what to install): 6 devices, speeches of
three plays each, as benchmarks.adapters_text. A row is one run; runs that the file has are not repeated.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch

import attune
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition, write_shards
from benchmarks.adapters_text import make_shards, speeches_of

PLACES: dict[str, dict[str, Any]] = {
    "server": {},
    "device": {"method.embedding": "device"},
    "device, secure sum": {"method.embedding": "device", "privacy.secure_aggregation": True, "privacy.secure_clip": 0.3},
}
DIGITS: dict[str, Any] = {"train.local_epochs": 2, "train.lr": 0.1}
MINILM: dict[str, Any] = {"train.local_epochs": 2, "train.lr": 0.1, "train.batch_size": 8}
SPEECHES = 6, (48, 48)  # devices, and speeches of each for training and for testing


def row(
    task: str, place: str, seed: int, rounds: int, shards: list[Path], model: str | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Run one federation, and return its row."""
    result = attune.simulate(shards, "fedtp", model, rounds, seed, {**settings, **PLACES[place]}, progress=False)
    clients = result.status["clients"]
    return {
        "task": task,
        "embedding": place,
        "seed": seed,
        "rounds": rounds,
        "devices": len(clients),
        "accuracy": round(fmean(client["accuracy"] for client in clients), 4),
        "common": round(fmean(client["accuracy_common"] for client in clients), 4),
        # Under secure aggregation no device reports what it sends.
        "bytes_a_device_and_round": "" if "secure" in place else round(result.bytes_moved / rounds / len(clients)),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The CSV file.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Shakespeare's plays, a folder: LoRA on MiniLM.")
@click.option("--rounds", default=30, show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True)
def main(out: Path, data: Path | None, rounds: int, seeds: tuple[int, ...]) -> None:
    """Run each place of the embedding with each seed."""
    torch.set_num_threads(1)
    task = "MiniLM, LoRA" if data else "digits"
    done = list(csv.DictReader(out.open(encoding="utf-8"))) if out.exists() else []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            if data is not None:
                shards, model, settings = (
                    make_shards(speeches_of(data), Path(folder) / "shards", *SPEECHES, seed),
                    "examples.minilm:lora",
                    MINILM,
                )
            else:
                cut = partition(load_dataset("digits"), "dirichlet", 10, seed=seed, alpha=0.3)
                shards, model, settings = write_shards(Path(folder), cut), None, DIGITS
            for place in PLACES:
                if any((one["task"], one["embedding"], one["seed"]) == (task, place, str(seed)) for one in done):
                    continue
                made = row(task, place, seed, rounds, shards, model, settings)
                click.echo(made)
                with out.open("a", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, made)
                    if not file.tell():
                        writer.writeheader()
                    writer.writerow(made)


if __name__ == "__main__":
    main()
