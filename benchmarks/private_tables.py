"""Tables of docs/privacy.md: accuracy under privacy by benchmarks.private_methods, and what attackers see in each mode."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from attune.common.statistics import interval_of_mean
from attune.simulation.grid_search import TrialSettings, best
from benchmarks.private_methods import EPSILONS, LOCAL, OUT, SCORE, TASKS
from benchmarks.visible_by_mode import HALF, OVER
from docs.markdown import table

VISIBLE = Path(__file__).parent / "results" / "visible_by_mode.csv"
SOLVED = Path(__file__).parent / "results" / "secure_solving.csv"
RIVALS = Path(__file__).parent / "results" / "rivals.csv"  # python -m benchmarks.rivals on the shards of each task
CHANCE = "correlation by chance"
TITLES = {
    "digits-linear": "Digits, ten devices, Dirichlet 0.3, linear model: accuracy in %",
    "digits-dnn": "Digits, ten devices, Dirichlet 0.3, one hidden layer: accuracy in %",
    "school": "School, 139 schools, linear model: squared error of y/69, x 1000 (less is better)",
    "wisdm": "WISDM, 36 persons, linear model: accuracy in %",
}
NAMES = {
    LOCAL: "Local",
    "fedavg": "FedAvg",
    "fedavg+ft": "FedAvg, fine-tuned",
    "fedper": "FedPer",
    "mr-mtl": "MR-MTL",
    "fedmcsa": "FedMCSA",
}
TUNED = "fedavg+ft"


@dataclass(frozen=True)
class Figures:
    """Scores of one method with its chosen settings: on the validation parts, and on the test parts of each seed."""

    validation: float
    test: tuple[float, ...]


Rows = Mapping[tuple[str, str, str, str, str], Mapping[str, str]]  # by epsilon, method, part, settings and seed
Known = dict[tuple[float, str], Figures]  # by epsilon and method


def read(name: str) -> Rows:
    """Return the rows of a task; none if it was not run."""
    path = OUT / f"{name}.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(r["epsilon"], r["method"], r["part"], r["settings"], r["seed"]): r for r in csv.DictReader(file)}


def known(name: str, rows: Rows) -> Known:
    """Return the figures of a task. A method that was not run to the end at an epsilon has none there."""
    task = TASKS[name]
    made: Known = {}
    for epsilon, method in product(EPSILONS, task.methods):
        listed = task.listed(method, epsilon)
        tried = {one: _scores(rows, epsilon, method, "validation", one, task.trial_seeds) for one in listed}
        if not all(tried.values()):
            continue
        means = {settings: fmean(scores) for settings, scores in tried.items()}
        chosen = best(means)
        if test := _scores(rows, epsilon, method, "test", chosen, task.seeds):
            made[epsilon, method] = Figures(means[chosen], test)
    return made


def _scores(
    rows: Rows, epsilon: float, method: str, part: str, settings: TrialSettings, seeds: Sequence[int]
) -> tuple[float, ...]:
    """Return the scores of all seeds; none if one of them is missing."""
    keys = [(f"{epsilon:g}", method, part, " ".join(settings), str(seed)) for seed in seeds]
    return tuple(float(rows[key][SCORE]) for key in keys) if all(key in rows for key in keys) else ()


def sections() -> Iterator[str]:
    """Return the lines of all tables."""
    by_task = {name: known(name, read(name)) for name in TASKS}
    for name, figures in by_task.items():
        if figures:
            yield f"**{TITLES[name]}**"
            yield ""
            yield from _task(name, figures)
            yield ""
    yield "Gain by federating, over devices that train alone: of fine-tuned FedAvg, and of the other method that is best"
    yield "on validation parts, with its 95 % interval over seeds (bold: not 0)."
    yield ""
    yield from _gains(by_task)
    missing = [
        f"{name} at {_epsilon(epsilon)}" for name, epsilon in product(TASKS, EPSILONS) if _is_open(name, epsilon, by_task)
    ]
    if missing:
        yield ""
        yield f"Not run, or not to the end: {', '.join(missing)}."


def _is_open(name: str, epsilon: float, by_task: Mapping[str, Known]) -> bool:
    return not all((epsilon, method) in by_task[name] for method in TASKS[name].methods)


def _task(name: str, figures: Known) -> Iterator[str]:
    rows = [
        [NAMES[method], *(_cell(name, figures.get((epsilon, method))) for epsilon in EPSILONS)]
        for method in TASKS[name].methods
        if any((epsilon, method) in figures for epsilon in EPSILONS)
    ]
    yield from table(("", *map(_epsilon, EPSILONS)), [*_alone(name), *rows])


def _alone(name: str, path: Path = RIVALS) -> Iterator[list[str]]:
    """Yield the row of scikit-learn's models that devices fit and choose alone. They have no noise, whatever epsilon is."""
    column = "mse" if TASKS[name].squared_error else "mean"
    recipe = name.replace("digits-dnn", "digits-linear")  # the same devices
    with path.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (r["recipe"], r["rival"]) == (f"private-{recipe}", "chosen")]
    if rows:
        sign = -1 if TASKS[name].squared_error else 1
        cell = _cell(name, Figures(0.0, tuple(sign * float(row[column]) for row in rows)))
        yield ["alone (scikit-learn), no noise", *[cell] * len(EPSILONS)]


def _epsilon(epsilon: float) -> str:
    return f"epsilon = {epsilon:g}".replace("inf", "∞")


def _in_unit(name: str, score: float) -> float:
    """Return a score as the tables show it."""
    return -1000 * score if TASKS[name].squared_error else 100 * score


def _cell(name: str, figures: Figures | None) -> str:
    if figures is None:
        return "-"
    values = [_in_unit(name, score) for score in figures.test]
    return f"{fmean(values):.1f} ± {stdev(values) / math.sqrt(len(values)):.1f}"


def _gains(by_task: Mapping[str, Known]) -> Iterator[str]:
    rows = []
    for name, figures in by_task.items():
        noisy = [method for method in TASKS[name].methods if method not in (LOCAL, TUNED)]
        gains = [_gain(name, figures, epsilon, noisy, figures.get((epsilon, LOCAL))) for epsilon in EPSILONS]
        rows.append([name, "with noise, over Local", *gains])
        gains = [_gain(name, figures, epsilon, [TUNED], figures.get((math.inf, LOCAL))) for epsilon in EPSILONS]
        rows.append([name, "fine-tuned, over Local without privacy", *gains])
    yield from table(("task", "compared", *map(_epsilon, EPSILONS)), rows)


def _gain(name: str, figures: Known, epsilon: float, methods: Sequence[str], rival: Figures | None) -> str:
    there = {method: one for method in methods if (one := figures.get((epsilon, method)))}
    if rival is None or not there:
        return "-"
    method = max(there, key=lambda one: there[one].validation)
    gains = [abs(_in_unit(name, 1.0)) * (mine - other) for mine, other in zip(there[method].test, rival.test, strict=True)]
    interval = interval_of_mean(gains)
    assert interval is not None
    low, high = interval
    by = "" if methods == [TUNED] else f", {NAMES[method]}"
    text = f"{fmean(gains):+.1f} ({low:.1f} to {high:.1f}){by}"
    return f"**{text}**" if low > 0 or high < 0 else text


def solved() -> Iterator[str]:
    """Return the lines of the table of single updates that are solved for from secure sums."""
    with SOLVED.open(newline="", encoding="utf-8") as file:
        lines = [
            [row["server"], row["devices"], f"{float(row['error']):.1%} ({float(row['least_error']):.1%})"]
            for row in csv.DictReader(file)
        ]
    yield from table(("the server", "the devices", "error"), lines)


def visible() -> Iterator[str]:
    """Return the lines of the table of attacks in each mode."""
    with VISIBLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    value = {(row["attack"], row["setting"], row["measure"], row["mode"]): row["value"] for row in rows}
    lines = []
    for attack, setting, measure in dict.fromkeys((row["attack"], row["setting"], row["measure"]) for row in rows):
        if measure not in (CHANCE, OVER, HALF):  # the text has the last two
            cells = []
            for mode in modes:
                chance, shown = (value.get((attack, setting, which, mode)) for which in (CHANCE, measure))
                by_chance = "" if chance is None else f" ({float(chance):.2f})"
                cells.append("" if shown is None else f"{float(shown):.2f}{by_chance}")
            lines.append([f"{attack}, {setting}", measure, *cells])
    yield from table(("attack", "measure", *modes), lines)
