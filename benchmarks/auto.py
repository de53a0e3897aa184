"""Cost of choosing: what devices keep by `auto`, below what they keep by the best of its candidates with all rounds.

`python -m benchmarks.auto --out FILE`. It uses recipes with bundled data, and writes a row for each point, seed and method as
it ends. It continues where it was interrupted. Candidates are finished too, as `auto` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from attune.fedserver.core.racing import ALONE
from attune.simulation.auto import USUAL
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.split import write_shards
from attune.simulation.recipes.catalogue import get
from attune.simulation.simulate import simulate
from benchmarks.study import Results

POINTS = {"digits": (40, 160), "relatedness": (1, 12)}
AUTO = "auto"
COLUMNS = ("recipe", "x", "rounds", "seed", "method", "chosen", "kept")


def kept(shards: Sequence[Path], method: str, rounds: int, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accuracy in percent, mean over devices, of what they keep by a method, and the method that was chosen."""
    options = {"name": method, **USUAL.get(method, {})}
    result = simulate(
        [str(shard) for shard in shards],
        options,
        None,
        rounds,
        seed,
        {**settings, "train.finish": "auto"},
        executor="stacked",
        progress=False,
    )
    accuracy = result.table().mean("kept")
    assert accuracy is not None
    return {"chosen": result.auto.chosen if result.auto else method, "kept": round(100 * accuracy, 2)}


def lines(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a table in Markdown: a line for each point and seed."""
    yield "| recipe | point | rounds | seed | `auto` chooses | kept by `auto` | best with all rounds | behind |"
    yield "|---|---|---|---|---|---|---|---|"
    runs = {tuple(row[name] for name in COLUMNS[:4]) for row in rows}
    for run in sorted(runs):
        by_method = {row["method"]: row for row in rows if tuple(row[name] for name in COLUMNS[:4]) == run}
        if AUTO not in by_method or len(by_method) < 2:
            continue
        raced, best = by_method.pop(AUTO), max(by_method.values(), key=lambda row: float(row["kept"]))
        behind = float(best["kept"]) - float(raced["kept"])
        yield (
            f"| {' | '.join(run)} | `{raced['chosen']}` | {raced['kept']} | {best['kept']} (`{best['method']}`) "
            f"| {behind:+.1f} |"
        )


@click.command()
@click.option("--recipe", "names", multiple=True, type=click.Choice(list(POINTS)), help="Only these recipes.")
@click.option("--x", "places", multiple=True, type=float, help="Only these points.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=20, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(names: tuple[str, ...], places: tuple[float, ...], seeds: tuple[int, ...], rounds: int, out: Path) -> None:
    """Run what is left, and print the table of all rows."""
    results = Results(out, COLUMNS)
    for recipe in map(get, names or POINTS):
        for point in recipe.points:
            if point.x not in (places or POINTS[recipe.name]):
                continue
            for seed in seeds:
                with tempfile.TemporaryDirectory(prefix="attune-auto-") as folder:
                    shards = write_shards(Path(folder) / "shards", point.cut(load_source(DIGITS, seed), seed))
                    for method in (AUTO, ALONE, *USUAL):
                        key = {"recipe": recipe.name, "x": f"{point.x:g}", "rounds": rounds, "seed": seed, "method": method}
                        if not any(all(row[name] == str(value) for name, value in key.items()) for row in results.rows()):
                            results.add([key | kept(shards, method, rounds, seed, recipe.settings)])
    for line in lines(results.rows()):
        click.echo(line)


if __name__ == "__main__":
    main()
