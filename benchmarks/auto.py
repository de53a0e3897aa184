"""Results of `auto` and of each of its candidates: what devices keep, and how many are harmed.

`python -m benchmarks.auto --out FILE`. It writes a row for each point, seed and method when a point is over, and continues
where it was interrupted. A candidate that is stopped at a rung and goes on has the bits of one that is not stopped
(tests/simulation/test_auto.py). So each candidate is trained once, with all rounds, and `auto` is decided by its scores.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import click
import torch

from attune.common.errors import SettingError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.work import baselines
from attune.fedclient.work.evaluation import Evaluation
from attune.fedserver.choosing.candidates import USUAL
from attune.fedserver.choosing.race_course import Course
from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM, DeviceScores, rungs_of
from attune.simulation.simulate import simulate
from benchmarks.recipes.catalogue import RECIPES, get
from benchmarks.recipes.run import Groups, harmed
from benchmarks.result_file import Results

AUTO, COMMON = "auto", "fedavg"
COLUMNS = ("recipe", "x", "rounds", "seed", "method", "chosen", "kept", "harmed")
Right = dict[str, torch.Tensor]  # by device: which labels of its test part are predicted


@dataclass(frozen=True)
class Outcome:
    """Result of one method with all rounds: the predictions of what devices keep, and scores by round and device."""

    kept: Right
    scores: Mapping[int, tuple[DeviceScores, ...]]


@contextmanager
def recorded() -> Iterator[Right]:
    """Record the predictions of what each device keeps, during the block. The last evaluation counts."""
    compared, blended, right_on_test = Evaluation.compared, Evaluation._blended, baselines.right_on_test
    latest: dict[int, torch.Tensor] = {}  # by the identity of a device's data: what it keeps, as known so far
    kept: Right = {}

    def recorded_right(candidates: Any, data: Any) -> Any:
        right = yield from right_on_test(candidates, data)
        latest[id(data)] = next(iter(right.values()))  # of its own model, unless there is a blend
        return right

    def recorded_blend(self: Any, members: Any) -> Any:
        latest[id(self._data)] = right = yield from blended(self, members)
        return right

    def recorded_comparison(self: Any, *rest: Any) -> Any:
        done = yield from compared(self, *rest)
        kept[self._trainer.name] = latest[id(self._data)]
        return done

    with (
        patch.object(Evaluation, "compared", recorded_comparison),
        patch.object(Evaluation, "_blended", recorded_blend),
        patch.object(baselines, "right_on_test", recorded_right),
    ):
        yield kept


def outcome(shards: Sequence[Path], method: str, rounds: int, seed: int, settings: Mapping[str, Any]) -> Outcome:
    """Train one method with all rounds.

    Raises:
        SettingError: The method does not fit the data, or these devices have no closed form.
    """
    rungs = (*rungs_of(rounds), rounds)
    options = {"name": ALONE if method == CLOSED_FORM else method, **USUAL.get(method, {})}
    given = {**settings, "train.score_after": list(rungs), "round.analytic": "off" if method == ALONE else "auto"}
    with recorded() as kept:
        result = simulate(
            [str(shard) for shard in shards], options, None, rounds, seed, given, executor="stacked", progress=False
        )
    if method == CLOSED_FORM and not result._plan.closed_form:
        raise SettingError(result._plan.no_closed_form)
    return Outcome(kept, {number: result.scores(number) for number in rungs})


def chosen(outcomes: Mapping[str, Outcome], rounds: int) -> str:
    """Return the method on which `auto` decides, from the scores that the candidates have at its rungs."""
    course = Course(list(outcomes), rounds)
    while (leg := course.leg) is not None:
        course.scored(*outcomes[leg.name].scores[leg.until])
    return course.result.chosen


def rows_of(
    key: Mapping[str, Any], outcomes: Mapping[str, Outcome], groups: Mapping[str, Groups | None], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a point and seed: of each method, and of `auto`."""
    rivals = {name: outcomes[name].kept for name in (ALONE, COMMON)}

    def row(method: str, by: str) -> dict[str, Any]:
        right = outcomes[by].kept
        others = {name: by_device for name, by_device in rivals.items() if name != by}
        worse = [
            harmed(right[name].numpy(), {other: of[name].numpy() for other, of in others.items()}, groups[name])
            for name in right
        ]
        values = {"kept": fmean(float(of.double().mean()) for of in right.values()), "harmed": fmean(worse)}
        return {**key, "method": method, "chosen": by, **{name: round(100 * value, 2) for name, value in values.items()}}

    yield row(AUTO, chosen(outcomes, rounds))
    for name in outcomes:
        yield row(name, name)


def _by_run(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], dict[str, Mapping[str, str]]]:
    """Return the rows by point and seed, and there by method."""
    runs: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = defaultdict(dict)
    for row in rows:
        runs[tuple(row[name] for name in COLUMNS[:4])][row["method"]] = row
    return dict(sorted(runs.items()))


def lines(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield what choosing costs as a table in Markdown: a line for each point and seed."""
    yield "| recipe | point | rounds | seed | `auto` chooses | kept by `auto` | best with all rounds | behind |"
    yield "|---|---|---|---|---|---|---|---|"
    for run, by_method in _by_run(rows).items():
        if AUTO not in by_method or len(by_method) < 2:
            continue
        raced = by_method[AUTO]
        best = max((row for name, row in by_method.items() if name != AUTO), key=lambda row: float(row["kept"]))
        behind = float(best["kept"]) - float(raced["kept"])
        yield (
            f"| {' | '.join(run)} | `{raced['chosen']}` | {raced['kept']} | {best['kept']} (`{best['method']}`) "
            f"| {behind:+.1f} |"
        )


@click.command()
@click.option("--recipe", "name", type=click.Choice(list(RECIPES)), help="Run this recipe; without it, print the table alone.")
@click.option("--x", "places", multiple=True, type=float, help="Only these points.")
@click.option("--data", help="The recipe's data set, if it is not bundled.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,), show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=20, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file.")
def main(name: str | None, places: tuple[float, ...], data: str | None, seeds: tuple[int, ...], rounds: int, out: Path) -> None:
    """Run what is left, and print the table of all rows."""
    results = Results(out, COLUMNS)
    if name is not None:
        measure(name, places, data, seeds, rounds, results)
    for line in lines(results.rows()):
        click.echo(line)


def measure(name: str, places: Sequence[float], data: str | None, seeds: Sequence[int], rounds: int, results: Results) -> None:
    """Run the points of a recipe that are left. Candidates that do not fit the data are left out."""
    recipe = get(name)
    for seed in seeds:
        source = recipe.load(data, seed)
        for point in recipe.points:
            key = {"recipe": f"{name} {point.series}".strip(), "x": f"{point.x:g}", "rounds": rounds, "seed": seed}
            done = any(all(row[part] == str(value) for part, value in key.items()) for row in results.rows())
            if done or point.x not in (places or [point.x]):
                continue
            with tempfile.TemporaryDirectory(prefix="attune-auto-") as folder:
                shards = point.write(Path(folder) / "shards", source, seed)
                outcomes: dict[str, Outcome] = {}
                for method in (ALONE, *USUAL):
                    with suppress(SettingError):  # it needs layers that the recipe's model has not
                        outcomes[method] = outcome(shards, method, rounds, seed, recipe.settings)
                groups = {shard.name: load_shard(shard).test_places for shard in shards}
            results.add(list(rows_of(key, outcomes, groups, rounds)))


if __name__ == "__main__":
    main()
