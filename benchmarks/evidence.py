"""Calibration of "probably helped" and "probably harmed" (fedserver/core/evidence.py) on fleets with known effects.

`python -m benchmarks.evidence --out benchmarks/results/evidence.csv`. In each fleet a share of the devices has no effect, and
the effects of the others come from one of several distributions. A call is wrong if the true gain is 0 or has the other sign.
The prior and the threshold of fedserver/core/evidence.py were fixed with this table, before any real fleet was judged.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from attune.fedserver.core.evidence import LEAST_DIFFERENCE, Belief, beliefs_of_counts, beliefs_of_gains

NONE = (1.0, 0.5, 0.3, 0.0)  # shares of devices without effect
SHARES = ((0.6, 10.0), (0.65, 300.0), (0.7, 30.0), (0.8, 20.0), (0.8, 100.0), (0.9, 100.0))  # mean and strength of π
SAMPLES = (12, 20, 50, 200)  # test samples, of which DISCORDANT are right in one model only
DISCORDANT = 0.3
GAINS = ((0.02, 0.1), (0.05, 0.02), (0.1, 0.05), (0.3, 0.3))  # mean and deviation of true gains
GROUPS = (8, 30)
DEVICES = (9, 20, 60)
THRESHOLDS = (0.95, 0.96, 0.97, 0.98)
ALL = "all"
COLUMNS = (
    "scores",
    "without_effect",
    "devices",
    "threshold",
    "test",
    "judged",
    "called",
    "wrong",
    "called_share",
    "wrong_share",
)
Size = int | str  # of the test part, or ALL
# Belief, whether the difference is large enough for a call, true effect with its sign, test samples or groups of them.
Judged = tuple[Belief, bool, float, int]


def counted(draw: np.random.Generator, none: float, devices: int, repeats: int) -> Iterator[Judged]:
    """Yield devices whose scores are right or wrong."""
    for mean, strength in SHARES:
        for samples in SAMPLES:
            for _ in range(repeats):
                share = draw.beta(mean * strength, (1 - mean) * strength, devices)
                share[draw.random(devices) < none] = 0.5
                discordant = draw.binomial(samples, DISCORDANT, devices)
                won = draw.binomial(discordant, share)
                counts = list(zip(won.tolist(), (discordant - won).tolist(), strict=True))
                for (b, c), belief, true in zip(counts, beliefs_of_counts(counts), share, strict=True):
                    yield belief, abs(b - c) >= LEAST_DIFFERENCE, float(true - 0.5), samples


def measured(draw: np.random.Generator, none: float, devices: int, repeats: int) -> Iterator[Judged]:
    """Yield devices whose scores are numbers, or whose samples have groups."""
    for mean, deviation in GAINS:
        for groups in GROUPS:
            for _ in range(repeats):
                true = np.where(draw.random(devices) < none, 0.0, draw.normal(mean, deviation, devices))
                spread = draw.uniform(0.05, 0.3, (devices, 1))
                values = true[:, None] + spread * draw.standard_normal((devices, groups))
                error = values.std(1, ddof=1) / groups**0.5
                gains = [(float(g), float(e), groups) for g, e in zip(values.mean(1), error, strict=True)]
                for belief, effect in zip(beliefs_of_gains(gains), true, strict=True):
                    yield belief, True, float(effect), groups


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The CSV file that is written.")
@click.option("--repeats", default=30, help="Fleets of each kind.")
def main(out: Path, repeats: int) -> None:
    """Write a row for each kind of score, share of devices without effect, fleet size, threshold and size of the test part.

    Of the test part's sizes, "all" stands for all of them together.
    """
    with out.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for scores, simulated in (("counts", counted), ("gains", measured)):
            for none in NONE:
                for devices in DEVICES:
                    judged, calls = Counter[Size](), Counter[tuple[Size, float, bool]]()
                    for belief, enough, effect, size in simulated(np.random.default_rng(devices), none, devices, repeats):
                        judged.update((ALL, size))
                        for threshold in THRESHOLDS:
                            if call := belief.effect(enough, threshold):
                                wrong = effect <= 0 if call == "helped" else effect >= 0
                                calls.update((of, threshold, wrong) for of in (ALL, size))
                    for of, count in judged.items():
                        for threshold in THRESHOLDS:
                            row = _row(count, calls[of, threshold, False], calls[of, threshold, True])
                            rows.writerow([scores, none, devices, threshold, of, *row])
                    file.flush()


def _row(judged: int, right: int, wrong: int) -> tuple[int, int, int, str, str]:
    called = right + wrong
    return judged, called, wrong, f"{called / judged:.4f}", f"{wrong / called:.4f}" if called else ""


if __name__ == "__main__":
    main()
