"""Comparison of what a device keeps (`--keep best`) with the common model and with the one that it trained alone.

`python -m benchmarks.choice --data uci_har=PATH --out FILE`. It uses the recipes' shards, and each method with `--baseline
local`. It writes a row for each point, seed and method as it ends, and continues where it was interrupted. The recipes' own
tables are stricter: their rivals are whole federations with `local` and with `fedavg`. Here the rivals are the models between
which a device chooses.

A device is harmed if the kept model is worse than a rival by the exact paired test with Holm's correction (5 %), as if test
samples were independent. "By groups" means that each group of test samples, where shards have groups, is one piece of evidence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np

from attune.common.config import TrainSettings
from attune.common.metrics import RIVALS, Rival
from attune.common.statistics import findings_of, pairs_of
from attune.fedclient.data.holdout import hold_out, strata
from attune.fedclient.data.prepare import prepare_features
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.artifact import Model
from attune.fedclient.work.blend import answers_of
from attune.simulation.partition.datasets import DIGITS
from attune.simulation.result import SimulationResult
from attune.simulation.simulate import simulate
from benchmarks.recipes.catalogue import SERVED, Recipe, RecipePoint, get
from benchmarks.recipes.run import harmed
from benchmarks.result_file import Results
from benchmarks.study import named

NETWORKS: tuple[Rival, ...] = ("common", "local")
TRIED = ("digits", "label-shift", "relatedness", "feature-shift", "hospitals", "one-minute")
KEY = ("recipe", "series", "x", "seed", "method")
FIGURES = ("devices", "choosing", "local", "common", "own", "kept", "behind", "harmed", "harmed_by_groups")


def methods(recipe: Recipe) -> tuple[str, ...]:
    """Return the methods of the comparison: the mean, attention, and a hypernetwork."""
    return ("fedavg", "fedmcsa", "pfedhn" if recipe.entries == SERVED else "fedtp")


def figures(
    shards: Sequence[Path], clients: Sequence[Mapping[str, Any]], models: Sequence[Model], local: Sequence[Model]
) -> dict[str, Any]:
    """Return means over devices, in the order of `shards`.

    `choosing` is the share of devices that hold out samples for the choice. `behind` is the number of points by which the kept
    model is below the better of the two rivals, all of them means over devices.
    """
    kept = fmean(client["accuracy_kept"] for client in clients)
    rivals = {name: [client[RIVALS[name].accuracy] for client in clients] for name in NETWORKS}
    means = {name: fmean(found) for name, found in rivals.items() if None not in found}
    worse = [is_harmed(*each) for each in zip(shards, clients, models, local, strict=True)]
    found: dict[str, float | None] = {
        **{name: means.get(name) for name in NETWORKS},
        "choosing": fmean(map(holds_out, shards)),
        "own": fmean(client["accuracy"] for client in clients),
        "kept": kept,
        "behind": 100 * (max(means.values()) - kept),
        "harmed": fmean(by_samples for by_samples, _ in worse),
        "harmed_by_groups": fmean(by_groups for _, by_groups in worse),
    }
    return {"devices": len(shards)} | {name: None if value is None else round(value, 4) for name, value in found.items()}


def is_harmed(shard: Path, client: Mapping[str, Any], model: Model, local: Model) -> tuple[bool, bool]:
    """Return whether this device is harmed, as if test samples were independent, and by groups of them.

    Args:
        shard: The device's shard.
        client: The device's row.
        model: The model that it keeps.
        local: The model that the device trained alone. A device that keeps its own model has compared it already.
    """
    if list(model.members) == ["personalized"]:
        pairs = pairs_of(client, RIVALS)
        alike = [replace(pair, tested=None, gain=None) for pair in pairs]
        return "worse" in findings_of(alike).values(), "worse" in findings_of(pairs).values()
    with np.load(shard / "test.npz") as test:
        x, y = test["x"], test["y"]
    features, classes = prepare_features(x, model.info.model, model.standardiser, shard.name), np.asarray(model.info.classes)
    rivals = {name: member for name, member in model.members.items() if name == "common"} | {"local": local.members["local"]}
    theirs = {name: classes[answers_of([member], features).numpy()] == y for name, member in rivals.items()}
    mine = np.asarray(model.predict(x)) == y
    return harmed(mine, theirs), harmed(mine, theirs, load_shard(shard).test_places)


def holds_out(shard: Path) -> bool:
    """Return whether the device can hold out samples for the choice."""
    found = load_shard(shard)
    return len(hold_out(strata(found.train_y, found.task), TrainSettings().validation, 0, found.kind, found.groups)[1]) > 0


def measured(recipe: Recipe, point: RecipePoint, data: str, seed: int, results: Results) -> None:
    """Measure the rows of a point that are missing."""
    key = {"recipe": recipe.name, "series": point.series, "x": f"{point.x:g}", "seed": str(seed)}
    there = {row["method"] for row in results.rows() if key.items() <= row.items()}
    with tempfile.TemporaryDirectory(prefix="attune-choice-") as folder:
        shards = point.write(Path(folder) / "shards", recipe.load(data, seed), seed)
        local = ended_with("local", shards, recipe, seed) if not set(methods(recipe)) <= there else None
        for method in methods(recipe):
            if local and method not in there:
                ended = ended_with(method, shards, recipe, seed)
                clients = {client["name"]: client for client in ended.status["clients"]}
                own, alone = ([each.model(shard.name) for shard in shards] for each in (ended, local))
                found = figures(shards, [clients[shard.name] for shard in shards], own, alone)
                results.add([key | {"method": method} | found])


def ended_with(method: str, shards: Sequence[Path], recipe: Recipe, seed: int) -> SimulationResult:
    """Run a whole federation. `local` trains the same model, bit by bit, as the baseline of the others."""
    return simulate(
        [str(shard) for shard in shards], method, None, recipe.rounds, seed, dict(recipe.settings), "local",
        executor="stacked", progress=False,
    )  # fmt: skip


def lines(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a table in Markdown: a line for each recipe, series and method, over points and seeds.

    "Both" stands for the common model and the one trained alone.
    """
    yield "| recipe | method | runs | devices that choose | kept, above the better of both: mean, least | harmed | by groups |"
    yield "|---|---|---|---|---|---|---|"
    for recipe, series, method in dict.fromkeys((row["recipe"], row["series"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["recipe"], row["series"], row["method"]) == (recipe, series, method)]
        gain = [-float(row["behind"]) for row in mine]
        choosing, worse, more = (fmean(float(row[name]) for row in mine) for name in ("choosing", "harmed", "harmed_by_groups"))
        title = f"{recipe}, {series}" if series else recipe
        yield (
            f"| `{title}` | `{method}` | {len(mine)} | {100 * choosing:.0f} % | {fmean(gain):+.1f}, {min(gain):+.1f} "
            f"| {100 * worse:.1f} % | {100 * more:.1f} % |"
        )


@click.command()
@click.option("--data", multiple=True, metavar="NAME=PATH", help="A recipe's data, by the file's name without suffix.")
@click.option("--recipe", "names", multiple=True, type=click.Choice(TRIED), help="Only these recipes.")
@click.option("--x", "places", multiple=True, type=float, help="Only these points of a recipe.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(data: tuple[str, ...], names: tuple[str, ...], places: tuple[float, ...], seeds: tuple[int, ...], out: Path) -> None:
    """Run what is left, and print the table of all rows."""
    results, files, recipes = Results(out, (*KEY, *FIGURES)), named(data), [get(name) for name in names or TRIED]
    for x in places:
        if not any(x == point.x for recipe in recipes for point in recipe.points):
            raise click.BadParameter(f"{' or '.join(recipe.name for recipe in recipes)} has no point {x:g}", param_hint="--x")
    for seed in seeds:
        for recipe in recipes:
            found = files.get(Path(recipe.data).stem) if recipe.data else DIGITS
            if found is None:
                click.echo(f"{recipe.name} is left out: it needs --data {Path(recipe.data).stem}=PATH", err=True)
                continue
            for point in (each for each in recipe.points if not places or each.x in places):
                measured(recipe, point, str(found), seed, results)
    for line in lines(results.rows()):
        click.echo(line)


if __name__ == "__main__":
    main()
