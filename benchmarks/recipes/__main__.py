"""A recipe from the command line: `python -m benchmarks.recipes digits`, `... school --data school.npz --seeds 0,1`.

It prints the recipe's table, and writes NAME.csv, NAME.manifest.jsonl and NAME.png. Rows that the file has are not run again.
"""

from __future__ import annotations

from pathlib import Path

import click

from attune.common.command_group import FOLDER
from attune.common.durable import check_folder
from attune.simulation.command import seeds_in
from benchmarks.recipes import catalogue, picture
from benchmarks.recipes.run import run


@click.command()
@click.argument("name")
@click.option("--data", type=click.Path(path_type=Path), help="The recipe's data set, if it is not bundled.")
@click.option("--out", type=FOLDER, default=Path("benchmark-out"), show_default=True, help="Folder for rows and picture.")
@click.option("--seeds", default="", metavar="N,N", help="Seeds of the cuts and of the methods (default: the recipe's).")
def main(name: str, data: Path | None, out: Path, seeds: str) -> None:
    """Compare the methods of the recipe NAME; docs/choosing.md lists the recipes."""
    recipe = catalogue.get(name)
    if (data is None) == bool(recipe.data):
        raise click.UsageError(f"{name} takes " + (f"--data, the path of {recipe.data}" if recipe.data else "no --data"))
    check_folder(out)
    chosen = seeds_in(seeds, None) if seeds else ()
    rows = run(recipe, None if data is None else str(data), out, lambda text: click.echo(text, err=True), seeds=chosen)
    for line in picture.lines(recipe, rows):
        click.echo(line)
    click.echo(f"rows in {out / recipe.name}.csv, picture in {picture.picture(recipe, rows, out / f'{recipe.name}.png')}")


if __name__ == "__main__":
    main()
