"""`fedserver simulate` runs methods on the same shards, `compare` compares finished runs, and `new` writes a project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune.common import homes
from attune.common.command_group import FILE, FOLDER, FORMAT, PATH, RoundsType
from attune.common.config import AUTO, PLAIN, PRESETS, convert, load_settings
from attune.common.durable import check_folder
from attune.common.errors import AttuneError, SettingError
from attune.fedclient.table_options import EXECUTOR, baseline_option, read_options, table_options

if TYPE_CHECKING:
    from attune.fedclient.data.lazy_shard import LazyShard
    from attune.fedclient.options import Hooks

PROJECT = Path(__file__).parent / "starter" / "project"  # the files that `new` writes


@click.command()
@click.option("--data", multiple=True, metavar="SHARD", help="A shard, or a quoted pattern ('shards/*').")
@table_options
@click.option(
    "--method", "methods", default="fedtp", show_default=True, help="Methods, with commas between them; auto: find the best."
)
@click.option(
    "--model",
    help="vit, transformer, dnn, mlr, or package.module:factory (default: by the kind of data, one that all methods can use).",
)
@click.option(
    "--hooks", "hooks_module", metavar="MODULE", help="Module with your own train() and evaluate(), for every method."
)
@click.option("--rounds", type=RoundsType(1), help="Rounds to train, or auto (default 40).")
@click.option("--seed", type=int, help="Seed of every random draw (default 0).")
@click.option("--seeds", metavar="N,N", help="Run each method with each of these seeds, and compare their means.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="[METHOD:]A.B=C",
    help="Any setting, such as method.sigma=50; for one method of several: fedavg+ft:method.tune_epochs=20.",
)
@click.option(
    "--grid",
    multiple=True,
    metavar="A.B=C,D",
    help="Choose this setting of each method that has it on parts of the training data, such as method.sigma=10,50,450.",
)
@click.option("--config", type=PATH, help="A federation.toml.")
@click.option(
    "--preset", type=click.Choice(PRESETS), help="plain: without what Attune adds to the papers; published: a paper's settings."
)
@baseline_option
@click.option(
    "--executor",
    type=EXECUTOR,
    help="How devices train: one by one (sequential), together (stacked), in processes, or on Ray.",
)
@click.option("--home", type=FOLDER, help="Keep all state in this folder, and continue from it.")
@click.option("--out", type=FOLDER, help="Write the results of each method below this folder.")
@click.option(
    "--table", "table_file", type=FILE, metavar="FILE", help="Write a row for each method to FILE.csv, .tex or .html."
)
@click.option("--dashboard", metavar="[HOST:]PORT", help="Serve a page to watch it in a browser (0: a free port).")
def simulate(
    data: tuple[str, ...],
    methods: str,
    model: str | None,
    hooks_module: str | None,
    rounds: int | str | None,
    seed: int | None,
    seeds: str | None,
    assignments: tuple[str, ...],
    grid: tuple[str, ...],
    config: Path | None,
    preset: str | None,
    home: Path | None,
    out: Path | None,
    table_file: Path | None,
    **given: Any,
) -> None:
    """Run whole federations in this process, without a network, and compare methods on the same shards."""
    listed = None if seeds is None else seeds_in(seeds, seed)
    if not data:
        raise click.UsageError("say --data SHARD")
    from attune.common.plan import DataSettings
    from attune.fedclient.options import NONE, Hooks
    from attune.fedserver.core.planning import turned_off
    from attune.simulation.arguments import data_by_name, overrides, read_shards, warnings_of
    from attune.simulation.compared_methods import Comparison
    from attune.simulation.comparison_table import comparison, comparison_over_seeds, course, courses, method_table
    from attune.simulation.grid_search import search
    from attune.simulation.over_seeds import SeedResults
    from attune.simulation.result_table import check_table
    from attune.simulation.simulate import simulate as run

    out, home = (None if path is None else path.expanduser() for path in (out, home))
    for folder, option in ((out, "--out"), (home, "--home")):
        if folder is not None:
            check_folder(folder, option)
    if table_file is not None:
        check_table(table_file)
    names = list(dict.fromkeys(filter(None, (name.strip() for name in methods.split(",")))))
    if not names:
        raise click.UsageError("--method names no method")
    if preset is not None:
        if AUTO in names:
            raise click.UsageError(f"--preset {preset}: auto compares methods with their everyday settings")
        assignments = (f"method.preset={preset}", *assignments)
    if AUTO in names and len(names) > 1:
        raise click.UsageError(
            "--method auto compares methods itself: give it alone, and name others with --set auto.candidates"
        )
    if AUTO in names and (single := [text for text in assignments if ":" in text.partition("=")[0]]):
        raise click.UsageError(
            f"--set {single[0]}: in a race, settings of one method stand beside its name, such as "
            """--set "auto.candidates={fedavg={}, fedtp={'train.lr'=0.1}}\""""
        )
    hooks = Hooks.of_module(hooks_module) if hooks_module else NONE
    running = {name: given[name] for name in ("baseline", "executor", "dashboard")}
    running |= {"train": hooks.train, "evaluate": hooks.evaluate}
    of_data = [assignment for assignment in assignments if assignment.startswith("data.")]  # others may be of one method
    declared = convert(DataSettings, load_settings(config, of_data, {}).get("data", {}), "data.")
    members = read_shards(data_by_name(data), read_options(given), declared)
    for line in warnings_of(members):
        click.echo(line, err=True)
    if names == [AUTO]:
        settings = load_settings(config, assignments, {})
        if grid:
            trial_seed = (listed or [seed or 0])[0]
            settings = race_settings(members, settings, model, rounds, seed, grid, trial_seed, given["executor"], out, hooks)
        place = home / AUTO if home else None
        seeded = {"seed": seed} if listed is None else {"seeds": listed}
        raced = run(members, AUTO, model, rounds, home=place, settings=settings, **running, **seeded)
        of_seeds = {AUTO: raced if isinstance(raced, SeedResults) else SeedResults({raced.summary["seed"]: raced})}
        for line in course(raced, members) if not isinstance(raced, SeedResults) else courses(raced):
            click.echo(line)
        if table_file is not None:
            click.echo(f"table in {method_table(of_seeds).save(table_file)}", err=True)
        if out is not None:
            raced.save(out / AUTO)
        return
    asked = Comparison(names, members, model, rounds, seed, hooks)
    compared = asked.methods(config, assignments)
    if grid:
        searched = search(
            asked, compared, grid, (listed or [seed or 0])[0], given["executor"], lambda text: click.echo(text, err=True)
        )
        compared = list(searched.chosen)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            searched.table().save(out / "grid.csv")
    results: dict[str, SeedResults] = {}
    unsaved = None
    for method in compared:
        if preset == PLAIN:
            off = turned_off(overrides(len(members), method.name, None, None, None, method.settings))
            values = [f"{key} ({value:g})" for key, value in off.items()] + (
                [] if given["baseline"] else ["ordinary models (--baseline)"]
            )
            click.echo(f"{method.name} ({preset}): off are {', '.join(values)}", err=True)
        click.echo(f"{method.name} ...", err=True)
        place = home / method.name if home else None
        if listed is None:
            result = run(members, method.name, home=place, settings=method.settings, **running)
            results[method.name] = SeedResults({result.summary["seed"]: result})
        else:
            result = run(members, method.name, home=place, seeds=listed, settings=method.settings, **running)
            results[method.name] = result
        if out is not None:
            try:
                result.save(out / method.name)
            except (AttuneError, OSError) as error:  # the results of the other methods shall not be lost
                unsaved = unsaved or error
                click.echo(f"the files of {method.name} are not written: {error}", err=True)
    if listed is None:
        shown = comparison(compared, {name: next(iter(of.values())) for name, of in results.items()}, members)
    else:
        shown = comparison_over_seeds(compared, results)
    for line in [*shown, *(searched.lines() if grid else ())]:
        click.echo(line)
    if table_file is not None:
        listing = method_table(results)
        for line in filter(None, (f"table in {listing.save(table_file)}", listing.note)):
            click.echo(line, err=True)
    if unsaved is not None:
        raise unsaved


def race_settings(
    members: Mapping[str, LazyShard], settings: Mapping[str, Any], model: str | None, rounds: int | str | None,
    seed: int | None, grid: tuple[str, ...], trial_seed: int, executor: Any, out: Path | None, hooks: Hooks,
) -> dict[str, Any]:  # fmt: skip
    """Choose settings for each entrant of a race by the grid, on validation parts, and return the settings of the race."""
    from attune.common.config import merge
    from attune.fedserver.choosing.candidates import ComparedMethod, entrants_of
    from attune.fedserver.choosing.racing import CLOSED_FORM
    from attune.simulation.arguments import overrides
    from attune.simulation.compared_methods import Comparison
    from attune.simulation.grid_search import as_options, search

    given = overrides(len(members), AUTO, model, rounds, seed, settings)
    profiles = {name: shard.profile for name, shard in members.items()}
    entrants = entrants_of(given, profiles, lambda _, of: overrides(len(members), None, None, None, None, of), list(members))
    methods = [ComparedMethod(name, of) for name, of in entrants.settings.items() if name != CLOSED_FORM]
    asked = Comparison([method.name for method in methods], members, model, hooks=hooks)
    searched = search(asked, methods, grid, trial_seed, executor, lambda text: click.echo(text, err=True))
    for line in searched.lines():
        click.echo(line)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        searched.table().save(out / "grid.csv")
    return merge(settings, {"auto": {"candidates": as_options(entrants.settings, searched.settings)}})


def seeds_in(text: str, seed: int | None) -> list[int]:
    """Return the seeds of --seeds.

    Raises:
        click.UsageError: They are no whole numbers, or --seed is given too.
    """
    if seed is not None:
        raise click.UsageError("give --seed or --seeds, not both")
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--seeds takes whole numbers with commas between them, such as 0,1,2; not {text!r}") from None
    if len(set(seeds)) < len(seeds):
        raise click.UsageError(f"--seeds {text}: a seed comes twice")
    return seeds


@click.command()
@click.option("--home", type=PATH, default=None, help="The folder of the server's state.")
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
@click.option("--out", type=FOLDER, help="Also draw a picture and a page into this folder.")
@FORMAT
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for machines.")
def compare(home: Path | None, runs: tuple[str, ...], out: Path | None, formats: tuple[Any, ...], as_json: bool) -> None:
    """Compare finished runs: runs of this home by their names, or else folders: homes, exported or saved results."""
    import msgspec

    from attune.fedserver.home import ServerHome
    from attune.simulation.compare import compared, read

    if out is not None:
        check_folder(out)
    data = read(runs, ServerHome(home or homes.server_home()))
    compared_runs = compared(data)
    if as_json:
        click.echo(msgspec.json.encode(compared_runs))
    else:
        from attune.simulation.compare_views import render

        click.echo(render(compared_runs, data))
    if out is not None:
        from attune.simulation.compare_views import write

        for line in write(compared_runs, data, out, formats):
            click.echo(line, err=as_json)


@click.command()
@click.argument("folder", type=PATH)
def new(folder: Path) -> None:
    """Write a small project to edit into FOLDER: data, model, training, settings; it runs at once."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already and is not empty; nothing was written: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "run.py", "data.py", "model.py", "federation.toml"):  # in the order in which to read them
        (folder / name).write_bytes((PROJECT / name).read_bytes())
        click.echo(folder / name)
    click.echo(f"now: cd {folder}; python run.py")
