"""False choices of `--method auto`, and what its choices lose, in fleets with known effects.

`python -m benchmarks.race_fleets --out benchmarks/results/race_fleets.csv`. In drawn fleets all candidates change the score of
a sample by a number of its deviations: by none, by the same at all devices, or half of them are helped and the others harmed as
much. A tenth of the samples are held out. In fleets of digits each device has names of its own for the classes, so that no
device helps another one; there the closed form alone is tested.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM, FALSE_CHOICES, at_end, gained_by_samples
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.split import partition, write_shards
from attune.simulation.simulate import simulate
from benchmarks.recipes import cuts
from benchmarks.result_file import Results

KINDS = ("nothing helps", "half helped, half harmed", "all helped", "all harmed", "few large losses")
EFFECT = 0.2  # deviations of a sample's score
DEVICES, SAMPLES, CANDIDATES = (4, 10, 36), (20, 60, 200), 5
ALIKE = 0.8  # correlation of the candidates' scores: all of them have the closed form and ordinary models in their blends
LOSSES = 0.1  # share of samples with a loss of nine times the gain of the others, whose mean is 0
COLUMNS = ("fleet", "devices", "samples", "races", "chosen", "by_samples", "lost")


def drawn(draws: np.random.Generator, kind: str, devices: int, samples: int) -> tuple[str, bool, float]:
    """Return what a race chooses in a drawn fleet, whether by all training samples, and what that loses per sample."""
    sign = {"half helped, half harmed": np.tile([1, -1], devices // 2), "all helped": 1, "all harmed": -1}.get(kind, 0)
    effect_D, held = np.broadcast_to(EFFECT * np.asarray(sign), devices), max(2, samples // 10)

    def noise(*size: int) -> Any:
        if kind == "few large losses":
            return np.where(draws.random(size) < LOSSES, -9.0, 1.0) / 3
        return draws.standard_normal(size)

    gain_DN = effect_D[:, None] + noise(devices, samples)
    common_D, own_KD = gain_DN[:, :held].sum(1), held**0.5 * draws.standard_normal((CANDIDATES, devices))
    score_KD = common_D + (1 / ALIKE**2 - 1) ** 0.5 * own_KD
    names = [str(device) for device in range(devices)]

    def by_device(of_D: Any) -> dict[str, float]:
        return dict(zip(names, of_D.tolist(), strict=True))

    scores = {CLOSED_FORM if not place else f"candidate{place}": by_device(of_D) for place, of_D in enumerate(score_KD)}
    gained = gained_by_samples(by_device(gain_DN.sum(1)), by_device(samples**0.5 * gain_DN.std(1, ddof=1)))
    decision = at_end({ALONE: dict.fromkeys(names, 0.0), **scores}, entered=CANDIDATES, gained=gained)
    mean, chosen = float(effect_D.mean()), decision.kept[0]
    return chosen, decision.difference == gained, max(0.0, mean) - (mean if chosen != ALONE else 0.0)


def digits(samples: int, seed: int) -> bool:
    """Return whether the closed form is chosen for ten devices of at most so many samples, classes by Dirichlet 0.3."""
    cut = cuts.fewer(partition(load_source(DIGITS, seed), "dirichlet", 10, seed, alpha=0.3), samples, seed)
    settings = {"model.name": "mlr", "train.local_steps": 1, "train.score_after": [1], "round.analytic": "auto"}
    with tempfile.TemporaryDirectory(prefix="attune-fleets-") as folder:
        shards = write_shards(Path(folder), cuts.relabelled(cut, 10, seed))
        result = simulate([str(shard) for shard in shards], "local", None, 1, seed, settings, progress=False)
    gained = gained_by_samples(*result.scores(1)[1:])
    return gained is not None and gained.p < FALSE_CHOICES / 2


def rows(races: int, fleets: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of fleet, number of devices and of training samples. `lost` is per sample, in deviations."""
    for kind in KINDS:
        for devices in DEVICES:
            for samples in SAMPLES:
                draws = np.random.default_rng(devices + samples)
                ended = [drawn(draws, kind, devices, samples) for _ in range(races)]
                chosen, by_samples = ([of[0] != ALONE for of in ended], [of[1] for of in ended])
                lost = np.mean([of[2] for of in ended])
                yield _row(kind, devices, samples, races, chosen, by_samples) | {"lost": f"{lost:.4f}"}
    for samples in (20, 60) if fleets else ():
        chosen = [digits(samples, seed) for seed in range(1, 1 + fleets)]
        yield _row("digits, each device with names of its own", 10, samples, fleets, chosen, chosen) | {"lost": ""}


def _row(kind: str, devices: int, samples: int, races: int, chosen: list[bool], by_samples: list[bool]) -> dict[str, Any]:
    shares = {"chosen": f"{np.mean(chosen):.4f}", "by_samples": f"{np.mean(by_samples):.4f}"}
    return {"fleet": kind, "devices": devices, "samples": samples, "races": races, **shares}


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The CSV file that is written.")
@click.option("--races", default=2000, show_default=True, help="Drawn fleets of each kind.")
@click.option("--fleets", default=20, show_default=True, help="Fleets of digits of each kind.")
def main(out: Path, races: int, fleets: int) -> None:
    """Write the rows."""
    Results(out, COLUMNS).add(list(rows(races, fleets)))


if __name__ == "__main__":
    main()
