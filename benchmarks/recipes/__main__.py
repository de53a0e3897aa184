"""A recipe from the command line: `python -m benchmarks.recipes digits`, `... school --data school.npz --seeds 0,1`.

It prints the recipe's table, and writes NAME.csv, NAME.manifest.jsonl and NAME.png. Rows that the file has are not run again.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from attune.common.command_group import FOLDER
from attune.common.durable import check_folder
from attune.simulation.command import seeds_in
from benchmarks.recipes import catalogue, picture, run


@click.command()
@click.argument("name")
@click.option("--data", type=click.Path(path_type=Path), help="The recipe's data set, if it is not bundled.")
@click.option("--out", type=FOLDER, default=Path("benchmark-out"), show_default=True, help="Folder for rows and picture.")
@click.option("--seeds", default="", metavar="N,N", help="Seeds of the cuts and of the methods (default: the recipe's).")
@click.option(
    "--decide", is_flag=True, help="Write only the page to decide by, about FedAvg: NAME.html, and its figures NAME.json."
)
def main(name: str, data: Path | None, out: Path, seeds: str, decide: bool) -> None:
    """Compare the methods of the recipe NAME; docs/choosing.md lists the recipes."""
    recipe = catalogue.get(name)
    if (data is None) == bool(recipe.data):
        raise click.UsageError(f"{name} takes " + (f"--data, the path of {recipe.data}" if recipe.data else "no --data"))
    check_folder(out)
    if decide:
        out.mkdir(parents=True, exist_ok=True)
        said = run.decide(recipe, None if data is None else str(data), out / f"{name}.html")
        (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n")
        return
    chosen = seeds_in(seeds, None) if seeds else ()
    rows = run.run(recipe, None if data is None else str(data), out, lambda text: click.echo(text, err=True), seeds=chosen)
    for line in picture.lines(recipe, rows):
        click.echo(line)
    click.echo(f"rows in {out / recipe.name}.csv, picture in {picture.picture(recipe, rows, out / f'{recipe.name}.png')}")


if __name__ == "__main__":
    main()
