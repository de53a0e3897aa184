"""Embeddings of clients with similar data: are they similar? FedTP on CIFAR-100, with five clients for each coarse class.

`python -m benchmarks.coarse --data cifar100.npz --out benchmarks/results`. The server does not know the coarse classes. The
figure is the share of clients whose nearest neighbour in embedding space has the same coarse class. It is measured for siblings
that share every fine class, and for siblings that share none (`each=one-class`), with a map (t-SNE) of each.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attune.fedserver.lab.aggregators.stored import read_embeddings
from attune.fedserver.lab.arrays import ArrayFile
from attune.fedserver.view.plot_clients import neighbours
from benchmarks.federation import Home
from benchmarks.result_file import table
from benchmarks.study import shortened

COLUMNS = (
    "siblings", "rounds", "clients", "samples", "nearest_is_sibling", "by_chance", "mean_over_clients", "settings", "seed",
    "seconds",
)  # fmt: skip
SIBLINGS = 5
VARIANTS = {"every class": "equal", "one class each": "one-class"}


def write_labels(names: list[str], out: Path) -> dict[str, str]:
    """Write `client,label` for `fedserver plot`: shards 5c to 5c + 4 belong to coarse class c."""
    coarse = {name: f"{int(name.rpartition('shard')[2]) // SIBLINGS:02}" for name in names}
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("client", "label"), *coarse.items()])
    return coarse


def nearest_share(export: Path, coarse: dict[str, str]) -> tuple[float, float]:
    """Return the share of clients whose nearest neighbour is a sibling, and this share by chance, from an export's files."""
    with ArrayFile(export / "server.safetensors") as file:
        names, z_NE = read_embeddings(file)
    found = neighbours(z_NE, [coarse[name] for name in names])
    assert found is not None, "there are twenty coarse classes"
    return found


def variant(
    siblings: str, data: Path, rounds: int, samples: int, settings: Sequence[str], seed: int, picture: Path
) -> dict[str, Any]:
    """Run one federation to its end. Return its row, and draw the map of its embeddings."""
    home, started = Home(Path(tempfile.mkdtemp(prefix="attune-coarse-"))), time.monotonic()
    shards = home.folder / "shards"
    drawn = shortened(data, samples, seed, home.folder / "drawn.npz")
    flags = ("--rounds", rounds, *(word for each in settings for word in ("--set", each)))
    scheme = ("--scheme", "coarse5", "--set", f"each={VARIANTS[siblings]}", "--seed", seed)
    try:
        home.run("fedclient", "partition", "--dataset", drawn, *scheme, "--out", shards)
        clients = len(list(shards.glob("*/train.npz")))
        with home.server("--method", "fedtp", "--min-clients", clients, "--seed", seed, *flags) as (address, _):
            home.run("fedclient", "--data", f"{shards}/*/", "--server", address)
        status, export = home.status(), home.export()
        labels = home.folder / "labels.csv"
        share, chance = nearest_share(export, write_labels([client["name"] for client in status["clients"]], labels))
        home.run("fedserver", "plot", "--picture", "embeddings", "--labels", labels, "--out", home.folder / "pictures")
        shutil.copyfile(home.folder / "pictures" / "embeddings.png", picture)
    finally:
        shutil.rmtree(home.folder)
    return {
        "siblings": siblings,
        "rounds": status["round"],
        "clients": clients,
        "samples": samples,
        "nearest_is_sibling": round(share, 4),
        "by_chance": round(chance, 4),
        "mean_over_clients": round(status["accuracy"]["mean_over_clients"], 4),
        "settings": " ".join(settings),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


@click.command()
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True), required=True, help="CIFAR-100 with its coarse labels, .npz."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for coarse.csv and the two maps.")
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True)
@click.option("--samples", type=click.IntRange(1000), default=5000, show_default=True, help="Samples of either part.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As for fedserver.")
def main(data: Path, out: Path, rounds: int, samples: int, seed: int, settings: tuple[str, ...]) -> None:
    """Run both variants."""
    with table(out / "coarse.csv", COLUMNS) as write:
        for siblings, each in VARIANTS.items():
            row = variant(siblings, data, rounds, samples, settings, seed, out / f"coarse_{each}.png")
            write(row)
            click.echo(row)


if __name__ == "__main__":
    main()
