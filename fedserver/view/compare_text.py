"""Runs side by side as text for a person: a line a run, then a line a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attune.common.pictures.figures import natural
from attune.fedserver.view.compare import AgainstFirst, ComparedRun, RunData
from attune.fedserver.view.status_text import WIDE

SHOWN = 60  # devices; --json and the page have them all


def render(found: Sequence[ComparedRun], runs: Sequence[RunData]) -> str:
    """Plain text off a terminal, colours on one."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as capture:
        console.print(_table(HEADS, map(line_of, found)))
        console.print()
        listed = devices_of(runs)
        console.print(_table(("device", *(run.name for run in runs)), listed[:SHOWN]))
        if len(listed) > SHOWN:
            console.print(f"... and {len(listed) - SHOWN} more devices: --json and --out have them all")
        if beaten := [each.name for each in found if each.no_better]:
            console.print(f"no better than a constant answer over clients: {', '.join(beaten)}", markup=False)
        for each in found[1:]:
            console.print(sentence(each.name, found[0].name, each.against_first), markup=False)
    return capture.get().rstrip("\n")


HEADS = (
    "run",
    "method",
    "model",
    "rounds",
    "devices",
    "over clients",
    "over samples",
    "constant",
    "helped",
    "gives",
    "moved",
    "seconds",
)


def line_of(each: ComparedRun) -> tuple[str, ...]:
    known = sum(each.verdicts.values())
    return (
        each.name,
        each.method,
        each.model or "-",
        f"{each.closed}/{each.rounds}",
        str(each.devices),
        share(each.mean_over_clients),
        share(each.over_samples),
        share(each.constant),
        f"{each.verdicts.get('better', 0)} of {known}" if known else "-",
        "-" if each.gives is None else f"{each.gives:+.4f}",
        f"{each.bytes / 1e6:.2f} MB",
        "-" if each.slowest_s is None else f"{each.slowest_s:.1f}",
    )


def devices_of(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """A line for each device of any run, with its accuracy in every run."""
    accuracies = [run.accuracies for run in runs]
    return [(name, *(share(found.get(name)) for found in accuracies)) for name in natural(set().union(*accuracies))]


def sentence(name: str, first: str, found: AgainstFirst | None) -> str:
    if found is None:
        return f"{name} and {first} have no device in common"
    certain = {"better": "better", "worse": "worse", "unclear": "not certainly different"}[found.verdict]
    return (
        f"{name} against {first}: better on {found.better} of {found.devices} devices, worse on {found.worse}, "
        f"{found.difference:+.4f} on average: {certain} (sign test, p = {found.p:.3g})"
    )


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(heads: Sequence[str], lines: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table
