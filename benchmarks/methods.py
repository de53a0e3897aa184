"""Every method on one task, each as a real federation: a server and a hosted fleet. A row is written as each federation ends.

`python -m benchmarks.methods --out benchmarks/results/methods.csv`: ten devices with two classes of digits each. With
`--shards` the task is any folder of shards; `--clients-out` writes a row for each client, too.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from attune.common.methods.registry import names
from attune.simulation.partition.datasets import load_source
from attune.simulation.partition.split import partition, write_shards
from benchmarks.federation import CLIENT_COLUMNS, client_rows, federation
from benchmarks.result_file import table
from benchmarks.rows import harmed

COLUMNS = (
    "method", "model", "rounds", "seed", "clients", "mean_over_clients", "over_samples", "lowest", "common", "local",
    "constant", "constant_over_samples", "harmed", "kept", "seconds",
)  # fmt: skip


def row_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return a federation in one row: means over clients, and how many clients keep which model.

    `harmed` is the share of clients whose own model is worse than the common one or the one trained alone, by the exact paired
    test.
    """
    clients, worse = status["clients"], harmed(status)

    def found(key: str) -> list[float]:
        return [client[key] for client in clients if client[key] is not None]

    def mean(key: str) -> float | None:
        return round(sum(found(key)) / len(found(key)), 4) if found(key) else None

    kept = Counter(client["kept"] for client in clients if client["kept"])
    return {
        "method": status["method"],
        "model": status["model"],
        "rounds": status["round"],
        "clients": len(clients),
        "mean_over_clients": mean("accuracy"),
        "over_samples": round(status["accuracy"]["over_samples"], 4) if status["accuracy"] else None,
        "lowest": round(min(found("accuracy")), 4) if found("accuracy") else None,
        "common": mean("accuracy_common"),
        "local": mean("accuracy_local"),
        "constant": mean("accuracy_constant"),
        "constant_over_samples": round(status["constant"]["over_samples"], 4) if status["constant"] else None,
        "harmed": None if worse is None else round(worse / len(clients), 4),
        "kept": " ".join(f"{name}:{count}" for name, count in sorted(kept.items())),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--clients-out", type=click.Path(path_type=Path), help="A CSV with a row for each client.")
@click.option("--shards", type=click.Path(path_type=Path, exists=True), help="A folder of shards, instead of digits.")
@click.option("--method", "methods", multiple=True, help="Only these methods (default: all).")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As for fedserver, for every method.")
@click.option("--baseline", is_flag=True, help="Each device also trains a local model, for comparison.")
def main(
    out: Path,
    clients_out: Path | None,
    shards: Path | None,
    methods: tuple[str, ...],
    rounds: int,
    seeds: tuple[int, ...],
    settings: tuple[str, ...],
    baseline: bool,
) -> None:
    """Run the methods one after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        table(out, COLUMNS) as write,
        table(clients_out, CLIENT_COLUMNS) as write_client,
    ):
        if shards is None:
            shards = Path(folder) / "shards"
            settings = ("model.name=vit", "train.local_epochs=5", *settings)
            write_shards(shards, partition(load_source("digits", 0), "pathological", 10, 0, classes_per_client=2))
        for seed in seeds:
            for method in methods or [name for name in names() if "lora" not in name]:  # the model has no adapters
                flags = ["--rounds", str(rounds), "--seed", str(seed), *(w for each in settings for w in ("--set", each))]
                ended = federation(method, shards, flags, baseline)
                row = row_of(ended.status) | {"seed": seed, "seconds": round(ended.seconds, 1)}
                write(row)
                for client in client_rows(ended.status):
                    write_client(client | {"seed": seed})
                click.echo(row)


if __name__ == "__main__":
    main()
