"""`fedserver simulate` runs several methods on the same shards; `fedserver compare` compares finished runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from attune.common import homes
from attune.common.config import load_settings
from attune.fedclient.table_options import table_options
from attune.fedclient.work.executor import EXECUTORS

if TYPE_CHECKING:
    from attune.simulation.result import SimulationResult


@click.command()
@click.option(
    "--data", multiple=True, metavar="SHARD", help="A shard, or a quoted pattern ('shards/*'); for a benchmark, its data set."
)
@table_options
@click.option("--benchmark", metavar="NAME", help="A recipe that compares methods: docs/choosing.md has them.")
@click.option("--method", "methods", default="fedtp", show_default=True, help="Methods, with commas between them.")
@click.option("--model", help="vit, transformer, dnn, mlr, or package.module:factory (default: by the kind of data).")
@click.option("--rounds", type=click.IntRange(1), help="Rounds to train (default 40).")
@click.option("--seed", type=int, help="Seed of every random draw (default 0).")
@click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any setting, such as method.sigma=50.")
@click.option("--config", type=click.Path(path_type=Path), help="A federation.toml.")
@click.option("--baseline", type=click.Choice(["local"]), help="Also train a model on each device alone, for comparison.")
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    help="How devices train: one by one (sequential), together (stacked), the faster of both (auto), in processes, or on Ray.",
)
@click.option("--try-executors", is_flag=True, help="Only measure a round of the first method with each executor.")
@click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="Keep all state in this folder, and continue from it."
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write the results of each method below this folder."
)
@click.option("--dashboard", metavar="[HOST:]PORT", help="Serve a page to watch it in a browser (0: a free port).")
def simulate(
    data: tuple[str, ...],
    benchmark: str | None,
    methods: str,
    model: str | None,
    rounds: int | None,
    seed: int | None,
    assignments: tuple[str, ...],
    config: Path | None,
    baseline: Literal["local"] | None,
    executor: Any,
    try_executors: bool,
    home: Path | None,
    out: Path | None,
    dashboard: str | None,
    label: str,
    **table: Any,
) -> None:
    """Run whole federations in this process, without a network, and compare methods on the same shards."""
    if benchmark is not None:
        run_recipe(benchmark, data, out or Path("benchmark-out"), seed)
        return
    if not data:
        raise click.UsageError("say --data SHARD, or --benchmark NAME")
    from attune.simulation.simulate import simulate as run
    from attune.simulation.trial import try_executors as measure_executors

    settings, results = load_settings(config, assignments, {}), {}
    names = list(dict.fromkeys(name.strip() for name in methods.split(",")))
    if try_executors:
        click.echo(repr(measure_executors(data, names[0], model, seed, settings, label=label, table=table)))
        return
    for method in names:
        click.echo(f"{method} ...", err=True)
        place = home / method if home else None
        results[method] = run(
            data,
            method,
            model,
            rounds,
            seed,
            settings,
            baseline,
            place,
            executor,
            dashboard=dashboard,
            label=label,
            table=table,
        )
        if out is not None:
            results[method].save(out / method)
    for line in comparison(results):
        click.echo(line)


def run_recipe(name: str, data: tuple[str, ...], out: Path, seed: int | None) -> None:
    """Run a recipe, print its table, and write rows and a picture into `out`.

    Raises:
        click.UsageError: The recipe needs a data set and has none, or the reverse.
    """
    from attune.simulation.recipes import catalogue, picture
    from attune.simulation.recipes.run import run

    recipe = catalogue.get(name)
    if len(data) != bool(recipe.data):
        raise click.UsageError(
            f"--benchmark {name} takes " + (f"--data, one path of {recipe.data}" if recipe.data else "no --data")
        )
    rows = run(
        recipe, data[0] if data else None, out, lambda text: click.echo(text, err=True), seeds=() if seed is None else (seed,)
    )
    for line in picture.lines(recipe, rows):
        click.echo(line)
    click.echo(f"rows in {out / recipe.name}.csv, picture in {picture.picture(recipe, rows, out / f'{recipe.name}.png')}")


def comparison(results: Mapping[str, SimulationResult]) -> list[str]:
    """Return a table of accuracies: a line for each device, a column for each method.

    Accuracies are those of the model that the method leads to. Below the devices follow the means, the mean accuracy of
    constant answers, and the methods that are no better than constant answers.
    """
    tables = {method: {row.device: row for row in result.table()} for method, result in results.items()}
    devices = sorted(set().union(*tables.values()))
    width = max(map(len, ("constant", *devices)))
    lines = [f"{'device':<{width}}  {'samples':>7}" + "".join(f"  {method:>{_wide(method)}}" for method in results)]
    for device in devices:
        cells = [_cell(method, table[device].accuracy) for method, table in tables.items()]
        samples = next(iter(tables.values()))[device].samples
        lines.append(f"{device:<{width}}  {samples:>7}" + "".join(cells))
    means = {method: result.table().mean("accuracy") for method, result in results.items()}
    constants = {method: result.table().mean("constant") for method, result in results.items()}
    for name, averages in (("mean", means), ("constant", constants)):
        if any(value is not None for value in averages.values()):
            lines.append(f"{name:<{width}}  {'':>7}" + "".join(_cell(method, value) for method, value in averages.items()))
    beaten = [
        m for m, mean in means.items() if mean is not None and (constant := constants[m]) is not None and mean <= constant
    ]
    return [*lines, *([f"no better than a constant answer: {', '.join(beaten)}"] if beaten else [])]


def _wide(method: str) -> int:
    return max(5, len(method))


def _cell(method: str, accuracy: float | None) -> str:
    text = "-" if accuracy is None else f"{accuracy:.3f}"
    return f"  {text:>{_wide(method)}}"


@click.command()
@click.option("--home", type=click.Path(path_type=Path), default=None, help="The folder of the server's state.")
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Also draw a picture and a page into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def compare(home: Path | None, runs: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Compare finished runs: homes, exported or saved results, and runs of this home by their names."""
    import msgspec

    from attune.fedserver.home import ServerHome
    from attune.simulation.compare import compared, read

    data = read(runs, ServerHome(home or homes.server_home()))
    compared_runs = compared(data)
    if as_json:
        click.echo(msgspec.json.encode(compared_runs))
    else:
        from attune.simulation.compare_views import render

        click.echo(render(compared_runs, data))
    if out is not None:
        from attune.simulation.compare_views import write

        for line in write(compared_runs, data, out):
            click.echo(line, err=as_json)
