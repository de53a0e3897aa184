"""Pictures of accuracies (by round, by client, over several runs) and of all metrics by round."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import msgspec

from attune.common.metrics import METRICS
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section
from attune.common.statistics import interval_of
from attune.common.task import SCORED, ScoredTask
from attune.fedserver.core.accuracy import ByRound, by_round
from attune.fedserver.core.records import Report
from attune.fedserver.view.summary import ClientSummary, Curve, CurvePoint, Figure, Summary

SERIES: dict[Curve, tuple[str, str, str]] = {  # label, colour, mark
    "before": ("as served, before local training", figures.BEFORE, "o"),
    "after": ("after local training from there", figures.AFTER, "o"),
    "common": ("common model", figures.COMMON, "D"),
    "local": ("a network trained alone", figures.LOCAL, "s"),
    "alone": ("best ordinary model alone", figures.ALONE, "^"),
    "kept": ("what devices keep", figures.KEPT, "h"),
}
BARS = 40  # clients with bars of their own; more are shown as points
NAMED = 120  # clients whose names fit below the axis
MARKED = 60  # states or rounds with a mark each
COLUMNS, HEADING = 3, 44  # panels of metrics side by side, and characters of a line above one
WORKS = {"train": ("training", figures.BEFORE), "evaluate": ("evaluation", figures.AFTER)}
AVERAGES = {"mean_over_clients": "mean over clients", "over_samples": "over all test samples"}


def figures_of(summary: Summary) -> Section:
    """Return the papers' figures as a table, without a picture."""
    rows: list[list[Cell]] = []
    tp, mcsa = summary.fedtp, summary.fedmcsa
    if tp is not None:
        which = f"{tp.evaluations} evaluations, every {tp.every} of the last {tp.last} rounds"
        rows.append([f"FedTP: over all test samples, mean ({which})", tp.mean])
        rows.append(["FedTP: over clients, mean of the same evaluations", tp.mean_over_clients])
        rows.append(["FedTP: standard deviation over these evaluations", tp.deviation])
    if mcsa is not None:
        rows.append([f"FedMCSA: best mean over clients (BMTA), after round {mcsa.bmta_round}", mcsa.bmta])
        rows.append(
            [f"FedMCSA: best over all test samples, after round {mcsa.bmta_over_samples_round}", mcsa.bmta_over_samples]
        )
        rows.append([f"FedMCSA: mean over clients of the last {mcsa.evaluations} evaluations", mcsa.mean_of_last])
        rows.append(["FedMCSA: over all test samples, mean of the same evaluations", mcsa.mean_of_last_over_samples])
    names: dict[Figure, str] = {
        "accuracy": "the clients' own models, latest",
        "before": "before the latest local training",
        "after": "after it",
        "common": "common model, latest",
        "local": "trained on the device alone, latest",
        "constant": "a constant answer",
        "alone": "best ordinary model alone (scikit-learn), latest",
        "accuracy_kept": "what clients keep, latest",
    }
    for key, average in summary.latest.items():
        rows.append([f"{names[key]}: mean over {average.clients} clients", average.mean_over_clients])
        rows.append([f"{names[key]}: over all test samples", average.over_samples])
    if summary.latest.get("constant"):
        rows.append(["clients whose model is no better than a constant answer", len(summary.no_better_than_constant)])
    words = {"alone": "best ordinary"}
    rows += [[f"clients that keep the {words.get(choice, choice)} model", count] for choice, count in summary.kept.items()]
    caption = f"{summary.closed} of {summary.rounds} rounds of {summary.method} with {summary.model}, seed {summary.seed}."
    return Section("The papers' figures", caption, None, PageTable(("figure", "value"), rows))


def curves(summary: Summary) -> Section:
    """Draw accuracy by state, over clients and over samples. Hollow marks: not all devices were asked."""
    figure = figures.new(12.0, 4.8)
    figure.suptitle(f"{summary.method} with {summary.model}")
    left, right = figure.subplots(1, 2, sharey=True)
    points = _drawn(summary)
    for axes, (key, label) in zip((left, right), AVERAGES.items(), strict=True):
        _curves_on(axes, summary, points, key)
        axes.set_xlabel("closed rounds")
        figures.score_axis(axes, summary.task, f", {label}")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    some = any(not point.whole for curve in points.values() for point in curve)
    hint = " Hollow marks and thin lines are of only those clients that took part in a round." if some else ""
    caption = (
        f"Each client's {summary.metric} on its own test part: the mean over clients, in which each counts the same, and over "
        "all test samples, in which each sample counts the same. What local training reaches stands above the state that it "
        f"began from.{hint}{figures.direction(summary.task)}"
    )
    return Section(f"{summary.metric.capitalize()} by round", caption, Picture("accuracy", figure), _curve_table(points))


def _drawn(summary: Summary) -> dict[Curve, list[CurvePoint]]:
    """Return the curves that have points. A model after round r was trained from state r - 1, and is drawn there.

    Beside state r, which many devices made of such models, training would seem to make models worse.
    """
    curves = {key: points for key in SERIES if (points := summary.curves.get(key))}
    began = [msgspec.structs.replace(point, round=point.round - 1) for point in curves.get("after", ())]
    return curves | ({"after": began} if began else {})


def _curves_on(axes: Any, summary: Summary, curves: Mapping[Curve, Sequence[CurvePoint]], average: str) -> None:
    """Draw one kind of average: a line for each model, and a line for a constant answer."""
    rounds = sorted({point.round for points in curves.values() for point in points})
    by_key = [{point.round: getattr(point, average) for point in points} for points in curves.values()]
    sizes = dict(zip(curves, figures.ringed([[at.get(r) for r in rounds] for at in by_key], 1.0), strict=True))
    for key, points in curves.items():
        label, colour, mark = SERIES[key]
        whole = [point for point in points if point.whole]
        size = (4.5 if len(points) <= MARKED else 2.5) * sizes[key]
        if len(whole) < len(points):
            face, thin = "white" if len(points) <= MARKED else "none", {"linewidth": 1, "alpha": 0.5}
            axes.plot(*_xy(points, average), f"-{mark}", color=colour, markerfacecolor=face, markersize=size, **thin)
        axes.plot(*_xy(whole, average), f"-{mark}", color=colour, linewidth=1.6 * sizes[key], markersize=size, label=label)
    if constant := summary.latest.get("constant"):
        axes.axhline(getattr(constant, average), color="0.4", linewidth=1, linestyle="--", label="a constant answer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figures.plain(axes)


def _xy(points: Sequence[CurvePoint], average: str) -> tuple[list[int], list[float]]:
    return [point.round for point in points], [getattr(point, average) for point in points]


def _curve_table(curves: Mapping[Curve, Sequence[CurvePoint]]) -> PageTable:
    by_state = {key: {point.round: point for point in points} for key, points in curves.items()}
    heads = ["closed rounds"]
    for key in curves:
        heads += [f"{key}: clients", "mean over clients", "over samples"]
    rows: list[list[Cell]] = []
    for state in sorted(set().union(*by_state.values())):
        row: list[Cell] = [state]
        for points in by_state.values():
            point = points.get(state)
            row += [point.clients, point.mean_over_clients, point.over_samples] if point else [None] * 3
        rows.append(row)
    return PageTable(heads, rows)


def bars(summary: Summary) -> Section:
    """Draw each client before and after its latest local training, with 95 % intervals."""
    by_name = {client.name: client for client in summary.clients if client.after is not None}
    listed = [by_name[name] for name in figures.natural(by_name)]
    many = len(listed) > BARS
    if many:
        listed.sort(key=lambda client: (client.before or 0.0, client.after or 0.0))
    figure = figures.new(min(max(6.0, 2 + 0.5 * len(listed)), 14.0), 5.4 if many else 4.6)
    axes = figure.add_subplot()
    before, after = [client.before for client in listed], [client.after for client in listed]
    for shift, (scores, label, colour) in enumerate(
        ((before, "before local training", figures.BEFORE), (after, "after local training", figures.AFTER))
    ):
        at, values, errors = _with_intervals(summary, listed, scores, (shift - 0.5) * (0.3 if many else 0.4))
        if many:
            axes.errorbar(at, values, yerr=errors, fmt="o", markersize=3, color=colour, elinewidth=0.7, alpha=0.85, label=label)
        else:
            axes.bar(at, values, width=0.4, color=colour, label=label)
            axes.errorbar(at, values, yerr=errors, fmt="none", ecolor="0.25", elinewidth=0.9, capsize=2)
    axes.set_xlim(-0.8, len(listed) - 0.2)
    figures.score_axis(axes, summary.task, ", 95 % interval" if SCORED[summary.task].of_trials else "")
    figures.legend_above(axes, "Each client before and after its latest local training")
    if len(listed) <= NAMED:
        names = figures.short([client.name for client in listed])
        upright = len(listed) > 12 or max(map(len, names), default=0) > 8
        axes.set_xticks(range(len(listed)), names, rotation=90 if upright else 0, fontsize=7 if many else 9)
    if many:
        axes.set_xlabel(f"{len(listed)} clients, by {summary.metric} before local training")
    figures.plain(axes)
    caption = (
        "Before: what the device started its latest training from. The intervals (Wilson's) show how certain an accuracy is on "
        f"so few test samples: if they overlap widely, a difference means little.{figures.direction(summary.task)}"
    )
    return Section("Local training", caption, Picture("training", figure), _training_table(listed, summary.task))


def _with_intervals(
    summary: Summary, listed: Sequence[ClientSummary], scores: Sequence[float | None], shift: float
) -> tuple[list[float], list[float], list[list[float]]]:
    """Return positions, values, and how far each interval reaches below and above its value; 0 without one."""
    at, values, below, above = [], [], [], []
    for position, (client, value) in enumerate(zip(listed, scores, strict=True)):
        if value is not None:
            low, high = interval_of(value, client.test_samples, summary.task) or (value, value)
            at.append(position + shift)
            values.append(value)
            below.append(max(0.0, value - low))
            above.append(max(0.0, high - value))
    return at, values, [below, above]


def _training_table(listed: Sequence[ClientSummary], task: ScoredTask) -> PageTable:
    text = partial(figures.interval_text, task=task)
    rows: list[list[Cell]] = [
        [c.name, c.test_samples, c.before, text(c.before, c.test_samples), c.after, text(c.after, c.test_samples)]
        for c in listed
    ]
    return PageTable(("client", "test samples", "before", "95 %", "after", "95 %"), rows)


@dataclass(frozen=True)
class SweepRun:
    """One federation of a sweep: its place on the x axis, and its summary."""

    name: str
    x: float
    summary: Summary


def sweep(runs: Sequence[SweepRun], label: str) -> Section:
    """Draw accuracy against a setting: a line for each method (averaged over runs at one place), a faint point for a client."""
    figure = figures.new(7.5, 4.8)
    axes = figure.add_subplot()
    methods: dict[str, dict[float, list[SweepRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.summary.fedtp is not None:
            methods[run.summary.method][run.x].append(run)
    rows: list[list[Cell]] = []
    for number, (method, places) in enumerate(sorted(methods.items())):
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        x, means, deviations, over_clients = sorted(places), [], [], []
        for place in x:
            papers = [run.summary.fedtp for run in places[place] if run.summary.fedtp is not None]
            values = [(paper.mean, paper.deviation) for paper in papers]
            over_clients.append(fmean(paper.mean_over_clients for paper in papers))
            means.append(fmean(value for value, _ in values))
            deviations.append(pstdev([value for value, _ in values]) if len(values) > 1 else values[0][1])
            spread = [client.accuracy for run in places[place] for client in run.summary.clients if client.accuracy is not None]
            axes.plot([place] * len(spread), spread, "o", color=colour, alpha=0.18, markersize=3.5, markeredgewidth=0, zorder=1)
            rows.append([method, f"{place:g}", len(values), means[-1], deviations[-1], over_clients[-1]])
        axes.plot(x, over_clients, "s:", color=colour, markersize=4, linewidth=1, markerfacecolor="white", zorder=2)
        axes.errorbar(x, means, yerr=deviations, fmt="o-", color=colour, capsize=3, label=method, zorder=3)
    axes.set_xlabel(label)
    figures.score_axis(axes, runs[0].summary.task, ", over all test samples")
    figures.legend_above(axes, f"Accuracy against {label}")
    figures.plain(axes)
    caption = (
        "By FedTP's protocol: the accuracy over all test samples, averaged over the last evaluations. Bars: the deviation over "
        "the runs at one place, or, for a single run, over its evaluations. Dotted, with hollow marks: the mean over clients "
        "of the same evaluations. Faint points: the clients."
    )
    table = PageTable(("method", label, "runs", "accuracy", "deviation", "over clients"), rows)
    return Section(f"Accuracy against {label}", caption, Picture("sweep", figure), table)


def metrics(rows: Sequence[Report]) -> Section:
    """Draw the mean over clients of each metric by round; the table also has the smallest and largest value.

    A metric whose mean never changes has no panel.
    """
    everything = by_round(rows)
    constants = {name: value for name, works in everything.items() if (value := _constant(works)) is not None}
    changing = {name: works for name, works in everything.items() if name not in constants}
    table: list[list[Cell]] = [
        [name, WORKS[work][0], r, len(numbers), fmean(numbers), min(numbers), max(numbers)]
        for name, works in everything.items()
        for work, rounds in sorted(works.items(), reverse=True)
        for r, numbers in sorted(rounds.items())
    ]
    caption = (
        "Every number that devices report with their answers, averaged over the clients that have it. What a training order "
        "was served is drawn at the round whose state it is."
    )
    if constants:
        caption += f" The same in every round, and so without a panel: {', '.join(f'{k} {v:g}' for k, v in constants.items())}."
    heads = ("metric", "order", "round", "clients", "mean", "smallest", "largest")
    picture = Picture("metrics", _panels_of(changing)) if changing else None
    return Section("Reports of the devices", caption, picture, PageTable(heads, table))


def _panels_of(changing: Mapping[str, Mapping[str, ByRound]]) -> Any:
    across = min(COLUMNS, len(changing))
    figure, panels = figures.panels(math.ceil(len(changing) / across), across, len(changing))
    lines: dict[str, Any] = {}
    for axes, (name, works) in zip(panels, changing.items(), strict=True):
        for work, rounds in sorted(works.items(), reverse=True):
            label, colour = WORKS[work]
            at = sorted(rounds)
            line = "-o" if len(at) <= MARKED else "-"
            # What the order of a round was served is the state after the round before.
            states = [r - 1 for r in at] if (name, work) == ("accuracy_before", "train") else at
            lines[label] = axes.plot(states, [fmean(rounds[r]) for r in at], line, color=colour, markersize=3)[0]
        axes.set_title(textwrap.fill(METRICS[name].heading, HEADING), fontsize=9)
        figures.plain(axes)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("round", fontsize=10)
    figure.suptitle("What devices report, mean over clients", fontsize=12)
    figure.legend(list(lines.values()), list(lines), frameon=False, fontsize=9, loc="upper right", ncols=len(lines))
    return figure


def _constant(works: Mapping[str, ByRound]) -> float | None:
    """Return the mean of a metric that is the same in every round, or None if it changes or there is one round."""
    means = [fmean(numbers) for rounds in works.values() for numbers in rounds.values()]
    return means[0] if len(means) > 1 and max(means) == min(means) else None
