"""Pictures of accuracies by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section
from attune.fedserver.view.summary import Curve, CurvePoint, Figure, Summary

SERIES: dict[Curve, tuple[str, str, str]] = {  # label, colour, mark
    "before": ("as served, before local training", figures.BEFORE, "o"),
    "after": ("after local training from there", figures.AFTER, "o"),
    "common": ("common model", figures.COMMON, "D"),
    "local": ("a network trained alone", figures.LOCAL, "s"),
    "alone": ("best ordinary model alone", figures.ALONE, "^"),
    "kept": ("what devices keep", figures.KEPT, "h"),
}
MARKED = 60  # states or rounds with a mark each
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
