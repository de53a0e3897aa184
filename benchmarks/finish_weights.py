"""Finished models in the blend: what devices would keep with other weights, fewer epochs, or another rate of finishing.

`python -m benchmarks.finish_weights --recipe digits-finished --x 80 --seed 0 --out benchmarks/results/finish_weights.csv`. Each
method is trained once. Then the blends are weighed again in several ways, each scored on the test parts, and by the likelihood
of held-out samples, with weights that are found without the sample (fedclient/work/blend.py). `--rate 0.1` finishes at the rate
of the recipes' tuned FedAvg in place of the training rate, and `--short` for 20 epochs everywhere; both weigh as now.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import click
import torch

from attune.fedclient.data.prepare import Prepared
from attune.fedclient.work import evaluation, weighing
from attune.fedclient.work.blend import ORIGINS, blended_shares, leave_one_out, pseudo_counts, weights_of
from attune.fedclient.work.evaluation import FAR_BEHIND
from attune.fedserver.core import finishing
from attune.simulation.recipes.catalogue import RECIPES, RecipeMethod, get
from attune.simulation.simulate import simulate
from benchmarks.result_file import Results

KEY = ("recipe", "x", "seed", "method")
COLUMNS = (*KEY, "weights", "kept", "nats")
NOW, ALWAYS, ORIGIN, MORE = "as they are", "the common model always finished", "with the shares of their origins", "x 3"
WEIGHED = (NOW, ALWAYS, ORIGIN, MORE)
SHORT, RATED = "20 epochs", "at the rate of tuned FedAvg"
WAYS: Mapping[str, str] = {way: way for way in WEIGHED}  # for the name of each row, how its blends are weighed
METHODS = ("FedMCSA", "FedMCSA, dial", "FedTP")
ByModel = Mapping[Any, torch.Tensor]  # by the model's name


@dataclass(frozen=True)
class Device:
    """One device's models in its last evaluation.

    Attributes:
        held_out: What each model gives to the right label of each held-out sample, (V,).
        test: Probabilities of each model on the test part, (n, C).
        y: Labels of the test part, (n,).
        prior: Shares of models, as other devices found them.
        far: Whether the common model is so far behind that it would not have been finished.
    """

    held_out: ByModel
    test: ByModel
    y: torch.Tensor
    prior: Mapping[Any, float]
    far: bool

    def kept(self, way: str) -> tuple[float, float]:
        """Return (the accuracy of the blend on the test part, the log-likelihood of the held-out samples)."""
        names = [name for name in self.held_out if not (way == NOW and self.far and name == "finished-common")]
        known = all(self.prior.get(ORIGINS.get(name, name), 0.0) for name in names)
        counts = dict(zip(names, pseudo_counts(names, self.prior), strict=True))
        for name in ORIGINS.keys() & counts if way in (ORIGIN, MORE) else ():
            counts[name] = 3.0 if way == MORE else counts[ORIGINS[name]] if known else 1.0
        # Names of our own, because weights_of knows finished models by their names.
        given: dict[Any, torch.Tensor] = {f"{name}!": self.held_out[name] for name in names}
        prior: dict[Any, float] = {f"{name}!": counts[name] for name in names}
        weights: Mapping[Any, float] = weights_of(given, prior)
        blended = torch.stack([weights[f"{name}!"] * self.test[name] for name in names]).sum(0)
        right = blended.argmax(1) == self.y
        return float(right.double().mean()), leave_one_out(given, prior)


def devices_of(
    shards: Sequence[Path],
    entry: RecipeMethod,
    rounds: int,
    seed: int,
    settings: Mapping[str, Any],
    rate: float | None = None,
    short: bool = False,
) -> list[Device]:
    """Train one method, and return the models of each device in the last evaluation, with the common model always finished.

    Args:
        shards: The data of each device.
        entry: The method.
        rounds: Number of rounds.
        seed: Seed of all draws.
        settings: Of the recipe.
        rate: Learning rate of finishing; None: that of training.
        short: Finish for 20 epochs, also where these have few steps (fedserver.core.finishing).
    """
    latest: dict[int, tuple[weighing.Weighed, Any, Prepared, Mapping[Any, float]]] = {}
    weighed = weighing.weighed

    def recorded(candidates: Any, own: Any, data: Prepared, prior: Any, portfolio: None) -> Any:
        found = yield from weighed(candidates, own, data, prior)
        latest[id(data)] = found, own, data, prior
        return found

    rated = {} if rate is None else {"train.finish_lr": rate}
    with (
        patch.object(evaluation, "weighed", recorded),
        patch.object(evaluation, "FAR_BEHIND", math.inf),
        patch.object(finishing, "FINISH_STEPS", 0 if short else finishing.FINISH_STEPS),
    ):
        simulate(
            [str(shard) for shard in shards], entry.method, None, rounds, seed, {**settings, **entry.settings, **rated},
            "local" if entry.baseline else "none", executor="stacked", progress=False,
        )  # fmt: skip
    found = []
    for blend, own, data, prior in latest.values():
        test = {name: blended_shares([replace(member, weight=1.0)], data.test_x) for name, member in blend.members.items()}
        nats = blend.likelihood
        far = nats.get("common", math.inf) < nats.get(own, -math.inf) - FAR_BEHIND * len(data.validation_x)
        found.append(Device(dict(blend.probability), test, data.test_y, dict(prior), own != "common" and far))
    return found


def rows_of(key: Mapping[str, Any], devices: Sequence[Device], ways: Mapping[str, str] = WAYS) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to weigh: the mean accuracy over devices in %, and nats per held-out sample.

    Args:
        key: The point, the seed and the method.
        devices: The models of each device.
        ways: As in WAYS.
    """
    samples = sum(len(next(iter(device.held_out.values()))) for device in devices)
    for name, way in ways.items():
        right, nats = zip(*(device.kept(way) for device in devices), strict=True)
        yield {**key, "weights": name, "kept": round(100 * fmean(right), 2), "nats": round(sum(nats) / samples, 4)}


def lines(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a table in Markdown: means over seeds of what is kept, and of the nats per held-out sample."""
    points: dict[tuple[str, ...], dict[str, list[Mapping[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        points[row["recipe"].removesuffix("-finished"), row["x"], row["method"]][row["weights"]].append(row)
    shown = (*WEIGHED, SHORT, RATED)
    yield f"| recipe | x | method | seeds | {' | '.join(shown)} |"
    yield "|---" * (len(shown) + 4) + "|"
    for point, ways in points.items():
        cells = [
            f"{fmean(float(row['kept']) for row in ways[way]):.1f} ({fmean(float(row['nats']) for row in ways[way]):.3f})"
            if ways[way]
            else ""
            for way in shown
        ]
        yield f"| {' | '.join(point)} | {len(ways[NOW])} | {' | '.join(cells)} |"


@click.command()
@click.option("--recipe", "name", type=click.Choice(list(RECIPES)), required=True)
@click.option("--x", "place", type=float, required=True, help="The point.")
@click.option("--data", help="The recipe's data set, if it is not bundled.")
@click.option("--method", "methods", multiple=True, default=METHODS, show_default=True)
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Finish at this rate, and weigh as now.")
@click.option("--short", is_flag=True, help="Finish for 20 epochs everywhere, and weigh as now.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(
    name: str,
    place: float,
    data: str | None,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    rate: float | None,
    short: bool,
    out: Path,
) -> None:
    """Run what is left, and print the table of all rows."""
    results, recipe = Results(out, COLUMNS), get(name)
    point = next(point for point in recipe.points if point.x == place)
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="attune-weights-") as folder:
            shards = point.write(Path(folder) / "shards", recipe.load(data, seed), seed)
            for entry in (entry for entry in recipe.entries if entry.label in methods):
                key = {"recipe": name, "x": f"{place:g}", "seed": seed, "method": entry.label}
                ways = {RATED: NOW} if rate else {SHORT: NOW} if short else WAYS
                done = key | {"weights": next(iter(ways))}
                if not any(all(row[part] == str(value) for part, value in done.items()) for row in results.rows()):
                    results.add(
                        rows_of(key, devices_of(shards, entry, recipe.rounds, seed, recipe.settings, rate, short), ways)
                    )
    for line in lines(results.rows()):
        click.echo(line)


if __name__ == "__main__":
    main()
