"""Verdicts on federation for each device: the page's first lines, and a picture of the models sorted by the gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

from attune.common import text
from attune.common.metrics import ACCURACIES
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section
from attune.common.statistics import RIVAL_WORDS, Verdict, interval_of
from attune.common.task import SCORED, ScoredTask
from attune.fedserver.core.records import Report
from attune.fedserver.view.summary import ClientSummary, Summary

DEVICES = "Devices"  # title of the section with each device's models
NAMED = 120  # devices whose names fit below the axis
WORDS: dict[Verdict | None, str] = {
    "better": "helped: what it keeps is better than all that it could have alone",
    "worse": "not helped: another model is better than what it keeps",
    "unclear": "unclear: too few test samples to say",
    "too few cases": "too few cases of one class in the test part",
    None: "not compared",
}
SHADES: dict[Verdict | None, str] = {"better": figures.COLOURS[0], "worse": figures.COLOURS[8], "unclear": "0.6", None: "0.85"}
NETWORKS = (
    (attrgetter("local"), "a network trained alone", figures.LOCAL, "s"),
    (attrgetter("common"), "common model", figures.COMMON, "D"),
    (attrgetter("own_accuracy"), "its own model, by federation", figures.BEFORE, "o"),
)
ENDS = (
    (attrgetter("alone"), "best ordinary model alone", figures.ALONE, "^"),
    (attrgetter("accuracy_kept"), "what it keeps", figures.KEPT, "h"),
)
SHIFT = 0.15  # places between the networks and what they are compared with in the end


def helped(summary: Summary, evaluated: Mapping[str, Report]) -> Section:
    """Return how many devices federation helps, and by how much, as a sentence and a table.

    Args:
        summary: The federation.
        evaluated: Each device's latest evaluation.
    """
    compared = [client for client in summary.clients if client.gain is not None]
    silent = withheld(evaluated)
    if compared:
        gain = fmean(client.gain or 0.0 for client in compared)
        count = sum(client.verdict == "better" for client in compared)
        words = "as high as" if abs(gain) < 0.0005 else f"{abs(gain):.3f} {'lower' if gain < 0 else 'higher'} than"
        caption = (
            f"Federation helps {count} of {len(compared)} devices for certain: on average, the {summary.metric} of "
            f"what a device keeps is {words} that of {_strongest(compared)}."
        )
        caption += f" {silent}." if silent else ""
    else:
        caption = f"Not known to the server: {unknown(summary, evaluated)}."
    rows = _counted(summary)
    if silent:
        rows.append(["withholds its scores", len(_withholding(evaluated)), None])
    table = PageTable(("verdict", "devices", "what federation gives, mean"), rows) if rows else None
    return Section("Who is helped?", caption, None, table)


def unknown(summary: Summary, evaluated: Mapping[str, Report]) -> str:
    """Return why the server does not know what federation gives; empty if it knows it of some device.

    Args:
        summary: The federation.
        evaluated: Each device's latest evaluation.
    """
    if any(client.gain is not None for client in summary.clients):
        return ""
    if any(client.verdict == "too few cases" for client in summary.clients):
        return "an AUROC needs 10 test cases of each class, and no device has compared one"
    if not evaluated:
        return "devices have compared nothing yet: they do after the last round, or every round.evaluate_every rounds"
    if silent := withheld(evaluated):
        return silent
    if not SCORED[summary.task].by_sample:
        return f"a {summary.metric} is no mean over test samples, by which devices could compare their models"
    if not any(row.test_samples for row in evaluated.values()):
        return "no device has a test part, on which it could compare models"
    return "devices had no other model to compare theirs with (fedclient --baseline alone fits one)"


def withheld(evaluated: Mapping[str, Report]) -> str:
    """Return which devices evaluated and reported no score, and how their sites see it; empty if there are none.

    Args:
        evaluated: Each device's latest evaluation.
    """
    names = _withholding(evaluated)
    if not names:
        return ""
    return (
        f"{len(names)} of {len(evaluated)} devices withhold their scores from the server ({text.listed(names, NAMED)}). Each "
        "site sees its own: as the last lines of fedclient, in model/model.json of its home, and by `fedclient evaluate`"
    )


def _withholding(evaluated: Mapping[str, Report]) -> list[str]:
    def tells(row: Report) -> bool:
        return row.ranked is not None or any(getattr(row, name) is not None for name in ACCURACIES)

    return figures.natural(name for name, row in evaluated.items() if row.test_samples and not tells(row))


def _strongest(compared: Sequence[ClientSummary]) -> str:
    """Return, in words, what the gains of these devices are against."""
    rivals = {client.rival for client in compared}
    return " or, where there is none, ".join(words for rival, words in RIVAL_WORDS.items() if rival in rivals)


def _counted(summary: Summary) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for verdict, words in WORDS.items():
        devices = [client for client in summary.clients if client.verdict == verdict]
        gains = [client.gain for client in devices if client.gain is not None]
        if devices:
            rows.append([words, len(devices), fmean(gains) if gains else None])
    return rows


def clients(summary: Summary) -> Section:
    """Draw each device's models (above) and its gain by federation (below), with intervals; some device has compared them."""
    listed = sorted_by_gain(summary.clients)
    wide = min(max(6.5, 2 + 0.42 * len(listed)), 15.0)
    figure = figures.new(wide, 7.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _models(above, listed, summary.task)
    _gains(below, listed)
    if len(listed) <= NAMED:
        names = figures.short([client.name for client in listed])
        upright = len(listed) > 12 or max(map(len, names)) > 6
        below.set_xticks(range(len(listed)), names, rotation=90 if upright else 0, fontsize=8 if len(listed) <= 60 else 6)
    below.set_xlim(-0.7, len(listed) - 0.3)
    below.set_xlabel(f"{len(listed)} devices, by what federation gives")
    caption = (
        "Every device on its own test part, the largest gain first. A verdict is certain if a paired test on the same test "
        "samples says so at 95 %. Thin lines are 95 % intervals: above, Wilson's for what the device keeps; below, Tango's for "
        "the difference on the same samples. If an interval below crosses zero, the device's test part is too small to tell."
        f"{figures.direction(summary.task)}"
    )
    caption += "".join(f" What devices keep {verdict['words']}." for verdict in summary.fleet)
    caption += f" {summary.auroc['words']}." if summary.auroc else ""
    return Section(DEVICES, caption, Picture("clients", figure), _table(listed, summary.task))


def sorted_by_gain(given: Sequence[ClientSummary]) -> list[ClientSummary]:
    """Return the clients that have compared their models, the largest gain first; equal ones by name."""
    by_name = {client.name: client for client in given if client.gain is not None}
    return sorted((by_name[name] for name in figures.natural(by_name)), key=lambda client: -(client.gain or 0.0))


def _models(axes: Any, listed: Sequence[ClientSummary], task: ScoredTask) -> None:
    few = len(listed) <= 60
    shift = SHIFT if any(client.accuracy_kept is not None for client in listed) else 0.0
    for at, client in enumerate(listed):
        position = at + shift
        rival = getattr(client, client.rival) if client.rival else None
        if rival is not None and client.compared is not None:
            heights, width = [rival, client.compared], 4 if few else 2
            axes.plot([position] * 2, heights, color=SHADES[client.verdict], linewidth=width, alpha=0.35)
        if client.compared is not None and (between := interval_of(client.compared, client.test_samples, task)):
            axes.plot([position] * 2, between, color="0.45", linewidth=0.8, zorder=2)
    for models, place in ((NETWORKS, -shift), (ENDS, shift)):
        sizes = figures.ringed([[score(client) for client in listed] for score, *_ in models], 7 if few else 3.5)
        for (score, label, colour, mark), size in zip(models, sizes, strict=True):
            placed = [(at + place, value) for at, client in enumerate(listed) if (value := score(client)) is not None]
            if placed:
                axes.plot(*zip(*placed, strict=True), mark, color=colour, markersize=size, label=label, mec="white", zorder=3)
    figures.score_axis(axes, task, top=1.03)
    figures.legend_above(axes, "Which devices federation helps")
    figures.plain(axes)


def _gains(axes: Any, listed: Sequence[ClientSummary]) -> None:
    named: dict[Verdict, str] = {"better": "helped", "unclear": "unclear", "worse": "not helped"}
    for verdict, label in named.items():
        placed = [(at, client) for at, client in enumerate(listed) if client.verdict == verdict]
        if placed:
            axes.bar([at for at, _ in placed], [c.gain for _, c in placed], width=0.7, color=SHADES[verdict], label=label)
    for at, client in enumerate(listed):
        if client.gain_interval is not None:
            axes.plot([at] * 2, client.gain_interval, color="0.25", linewidth=0.8)
    axes.axhline(0, color="0.2", linewidth=0.9)
    axes.set_ylabel("what federation gives")
    figures.legend_above(axes, "")
    figures.plain(axes)


def _table(listed: Sequence[ClientSummary], task: ScoredTask) -> PageTable:
    rivals = [name for name in RIVAL_WORDS if any(getattr(client, name) is not None for client in listed)]
    heads = (
        "device",
        "test samples",
        "gives",
        "95 %",
        "verdict",
        "probably",
        "kept",
        "95 %",
        "own",
        *rivals,
        "constant",
        "keeps mostly",
    )

    def row(c: ClientSummary) -> list[Cell]:
        between = "" if c.gain_interval is None else "{:+.3f} to {:+.3f}".format(*c.gain_interval)
        interval = figures.interval_text(c.compared, c.test_samples, task)
        mine: list[Cell] = [c.name, c.test_samples, c.gain, between, c.verdict, c.probably, c.compared, interval]
        return [*mine, c.own_accuracy, *(getattr(c, name) for name in rivals), c.constant, c.kept]

    return PageTable(heads, [row(client) for client in listed])
