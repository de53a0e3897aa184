"""What a constant answer reaches: each client's most frequent training class, on its own test part.

`python -m benchmarks.majority SHARDS`. Where clients have few classes this is high, and an accuracy means little without it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import click
import numpy as np


def constant_answers(shards: Path) -> dict[str, tuple[float, int]]:
    """client -> (accuracy of its most frequent training class, test samples). Of equally frequent ones the first counts."""
    found = {}
    for folder in sorted(path.parent for path in shards.glob("*/train.npz")):
        with np.load(folder / "train.npz") as train, np.load(folder / "test.npz") as test:
            classes, counts = np.unique(train["y"], return_counts=True)
            found[folder.name] = float((test["y"] == classes[counts.argmax()]).mean()), len(test["y"])
    return found


@click.command()
@click.argument("shards", type=click.Path(path_type=Path, exists=True))
def main(shards: Path) -> None:
    """Prints the mean over clients, and over samples."""
    found = constant_answers(shards)
    samples = sum(size for _, size in found.values())
    over_samples = sum(accuracy * size for accuracy, size in found.values()) / samples
    click.echo(f"{len(found)} clients: {fmean(a for a, _ in found.values()):.4f} over clients, {over_samples:.4f} over samples")


if __name__ == "__main__":
    main()
