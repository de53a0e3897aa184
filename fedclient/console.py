"""What the person at the device sees: plain lines, and on a terminal one line of progress below them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attune.common.interval import wilson

if TYPE_CHECKING:
    from rich.progress import Progress

    from attune.fedclient.messages import Result


class Console:
    """Plain lines, never wrapped: for logs, pipes and tests."""

    def say(self, text: str) -> None:
        click.echo(text)

    def result(self, result: Result) -> None:
        """An order was carried out."""
        self.say(line_of(result))

    def kept(self, message: str, result: Result, path: Path) -> None:
        """The federation is over: the server's `message`, and the finished model of `result` at `path`."""
        self.say(f"done: {message}" if message else "done")
        for line in comparison_of(result):
            self.say(line)
        accuracy = "" if result.accuracy is None else f"  accuracy {result.accuracy:.3f}"
        self.say(f"model{accuracy}  {path}")

    def progress(self, what: str, done: float) -> None:
        """`done` is a share, 0 to 1."""

    def close(self) -> None:
        """Draws nothing from now on."""


class TerminalConsole(Console):
    """Lines as above, and below them a progress bar for the current order."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        self._bar: Progress = Progress(*columns, TimeElapsedColumn(), transient=True, refresh_per_second=4)
        self._task = self._bar.add_task("", total=1.0, visible=False)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: float) -> None:
        self._bar.update(self._task, description=what, completed=done, visible=done < 1.0)

    def close(self) -> None:
        self._bar.stop()


def console() -> Console:
    """A terminal console if stdout is a terminal, else a plain one."""
    return TerminalConsole() if sys.stdout.isatty() else Console()


def line_of(result: Result, *who: str) -> str:
    """`round 3  loss 0.41  accuracy 0.93 -> 0.97`, with the numbers that exist; `who` comes after the round."""
    words = [f"round {result.round}" if result.trained else f"evaluated after round {result.round}", *who]
    if result.loss is not None:
        words.append(f"loss {result.loss:.4g}")
    accuracies = [f"{value:.3f}" for value in (result.accuracy_before, result.accuracy_after) if value is not None]
    if accuracies:
        words.append(f"accuracy {' -> '.join(accuracies)}")
    return "  ".join(words)


def comparison_of(result: Result) -> list[str]:
    """A line for each compared model with its 95 % interval; then whether personalization helps here, and which model stays."""
    found = {name: value for name, value in result.accuracies.items() if value is not None}
    own, others = found.get("personalized"), {name: value for name, value in found.items() if name != "personalized"}
    if own is None or not others:
        return []
    tested = result.test_samples or 0
    lines = []
    for name, value in found.items():
        low, high = wilson(value, tested)
        lines.append(f"{name:<12}  accuracy {value:.3f} ({low:.3f} to {high:.3f})")
    best_other = max(others, key=lambda name: others[name])
    low, high = wilson(own, tested)
    if low <= others[best_other] <= high:
        lines.append(f"personalization and the {best_other} model are too close to tell apart on {tested} test samples")
    elif own > others[best_other]:
        lines.append(f"personalization helps here: {own - others[best_other]:+.3f} over the {best_other} model")
    else:
        lines.append(f"personalization does not help here: {own - others[best_other]:+.3f} against the {best_other} model")
    held = result.validation_samples
    chosen = f"chosen on {held} samples held out of training" if held else "not chosen"
    return [*lines, f"kept: the {result.choice} model ({chosen})"]
