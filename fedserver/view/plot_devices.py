"""Verdicts on federation for each device: the page's first lines, and a picture of the models sorted by the gain."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

from attune.common.errors import SettingError
from attune.common.paired import RIVAL_WORDS
from attune.common.pictures import figures
from attune.common.pictures.page import Cell, PageTable, Picture, Section
from attune.common.statistics import Finding, interval_of
from attune.common.task import TASKS, TaskName
from attune.fedserver.view.summary import ClientSummary, Summary

NAMED = 120  # devices whose names fit below the axis
WORDS: dict[Finding | None, str] = {
    "better": "helped: what it keeps is better than all that it could have alone",
    "worse": "not helped: another model is better than what it keeps",
    "unclear": "unclear: too few test samples to say",
    None: "not compared",
}
SHADES: dict[Finding | None, str] = {"better": figures.COLOURS[0], "worse": figures.COLOURS[8], "unclear": "0.6", None: "0.85"}
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


def helped(summary: Summary) -> Section:
    """Return how many devices federation helps, and by how much, as a sentence and a table."""
    compared = [client for client in summary.clients if client.verdict is not None]
    if not compared:
        caption = (
            "Not known yet. Devices compare what they keep with other models when they evaluate: after the last round, or "
            "every round.evaluate_every rounds."
        )
        return Section("Who is helped?", caption, None, None)
    count = sum(client.verdict == "better" for client in compared)
    caption = (
        f"Federation helps {count} of {len(compared)} devices for certain. "
        f"What it gives is how much better what a device keeps is ({summary.metric}) than {_strongest(compared)}, on the same "
        "test samples. A verdict is certain if a paired test says so at 95 %."
    )
    caption += "".join(f" What devices keep {verdict['words']}." for verdict in summary.fleet)
    return Section(
        "Who is helped?", caption, None, PageTable(("verdict", "devices", "what federation gives, mean"), _counted(summary))
    )


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
    """Draw each device's models (above) and its gain by federation (below), with intervals.

    Raises:
        SettingError: No device has compared its models.
    """
    listed = sorted_by_gain(summary.clients)
    if not TASKS[summary.task].by_sample:
        raise SettingError(f"a {summary.metric} is no mean over test samples, by which devices could compare their models")
    if not listed:
        raise SettingError(
            "no device has compared its models yet: that comes after the last round, or with round.evaluate_every"
        )
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
        "Every device on its own test part, the largest gain first. Thin lines are 95 % intervals: above, Wilson's for what "
        "the device keeps; below, Tango's for the difference on the same samples. If an interval below crosses zero, the "
        f"device's test part is too small to tell.{figures.direction(summary.task)}"
    )
    return Section("Devices", caption, Picture("clients", figure), _table(listed, summary.task))


def sorted_by_gain(given: Sequence[ClientSummary]) -> list[ClientSummary]:
    """Return the clients that have compared their models, the largest gain first; equal ones by name."""
    by_name = {client.name: client for client in given if client.gain is not None}
    return sorted((by_name[name] for name in figures.natural(by_name)), key=lambda client: -(client.gain or 0.0))


def _models(axes: Any, listed: Sequence[ClientSummary], task: TaskName) -> None:
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
    named: dict[Finding, str] = {"better": "helped", "unclear": "unclear", "worse": "not helped"}
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


def _table(listed: Sequence[ClientSummary], task: TaskName) -> PageTable:
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
        "keeps",
    )

    def row(c: ClientSummary) -> list[Cell]:
        between = "" if c.gain_interval is None else "{:+.3f} to {:+.3f}".format(*c.gain_interval)
        interval = figures.interval_text(c.compared, c.test_samples, task)
        mine: list[Cell] = [c.name, c.test_samples, c.gain, between, c.verdict, c.probably, c.compared, interval]
        return [*mine, c.own_accuracy, *(getattr(c, name) for name in rivals), c.constant, c.kept]

    return PageTable(heads, [row(client) for client in listed])
