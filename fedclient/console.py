"""Output of a device for its user: plain lines, and on a terminal a progress bar below them."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attune.common.durable import forget_output
from attune.common.estimate import Estimate
from attune.common.statistics import RIVAL_WORDS, Finding, Pair, column_of, interval_of, verdict_on
from attune.common.task import SCORED
from attune.common.text import clean
from attune.fedclient.work.comparison import comparisons_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from attune.fedclient.messages import OrderResult

CLOSED = "fedclient: nobody reads this output any more; the device goes on without it"
WORDS: dict[Finding, str] = {
    "better": "helps here",
    "worse": "does not help here",
    "unclear": "makes no difference that so few test samples could show",
}
AGAINST_OWN: dict[Finding, str] = {"better": "it is better", "worse": "it is worse", "unclear": "which may be chance"}


class Console:
    """Output as plain lines, never wrapped, for logs, pipes and tests. `last_line` is what was said last."""

    last_line = ""

    def say(self, text: str) -> None:
        """Write a line."""
        self.last_line = text
        try:
            click.echo(text)
        except BrokenPipeError:
            forget_output(CLOSED)

    @cached_property
    def _estimate(self) -> Estimate:
        return Estimate()

    def result(self, result: OrderResult) -> None:
        """Write the result of an order."""
        self.say(line_of(result))

    def kept(self, message: str, result: OrderResult, path: Path | None) -> None:
        """Write the end of the federation.

        Args:
            message: The server's message.
            result: The result of the last order.
            path: The folder of the finished model; None if it is in memory.
        """
        self.say(f"done: {message}" if message else "done")
        for line in comparison_of(result):
            self.say(line)
        score = "" if result.accuracy is None else f"  {SCORED[result.task].metric} {result.accuracy:.3f}"
        self.say(f"model{score}  {path or 'in memory'}")

    def progress(self, what: str, done: float) -> None:
        """Note progress, `done` from 0 to 1. Long work gets a line with the time left now and then."""
        if line := self._estimate.at(what, done):
            self.say(line)

    def close(self) -> None:
        """Stop drawing."""


class TerminalConsole(Console):
    """Output as lines with a progress bar for the current order below them."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar: Progress = Progress(*columns, *times, transient=True, refresh_per_second=4)
        self._task = self._bar.add_task("", total=1.0, visible=False)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: float) -> None:
        self._bar.update(self._task, description=what, completed=done, visible=done < 1.0)

    def close(self) -> None:
        self._bar.stop()


def console() -> Console:
    """Return a terminal console if stdout is a terminal, else a plain one."""
    return TerminalConsole() if sys.stdout and sys.stdout.isatty() else Console()


def line_of(result: OrderResult, *who: str) -> str:
    """Return a line such as `round 3  loss 0.41  accuracy 0.93 -> 0.97`; `who` comes after the round."""
    words = [f"round {result.round}" if result.trained else f"evaluated after round {result.round}", *who]
    if result.loss is not None:
        words.append(f"loss {result.loss:.4g}")
    accuracies = [f"{value:.3f}" for value in (result.accuracy_before, result.accuracy_after) if value is not None]
    if accuracies:
        words.append(f"{SCORED[result.task].metric} {' -> '.join(accuracies)}")
    return "  ".join(words)


def comparison_of(result: OrderResult) -> list[str]:
    """Return a line for each compared model with its 95 % interval, then the verdict on what is kept, and what that is.

    Without a comparison there is at most the warning that the model is no better than a constant answer.
    """
    comparisons, warning = comparisons_of(result), []
    if result.no_better_than_constant:
        warning = [f"no better than a constant answer, which has {result.accuracy_constant:.3f}"]
    if not comparisons:
        return [*_auroc_of(result), *_others_of(result), *warning]
    lines, metric = [], SCORED[result.task].metric
    blend = {"kept": result.accuracy_kept} if len(result.weights) > 1 else {}
    for name, value in (result.accuracies | blend).items():
        if value is not None:
            between = interval_of(value, result.test_samples or 0, result.task)
            interval = f" ({between[0]:.3f} to {between[1]:.3f})" if between else ""
            lines.append(f"{name:<12}  {metric} {value:.3f}{interval}")
    for pair in comparisons:
        low, high = pair.interval()
        counts = f"better on {pair.better} of {pair.samples} test samples, worse on {pair.worse}: "
        counts = "" if result.task == "ranked" else counts
        lines.append(f"against {RIVAL_WORDS[pair.rival]}: {counts}{pair.difference:+.3f} ({low:+.3f} to {high:+.3f})")
    lines += [*_auroc_of(result), *_others_of(result)]
    lines.append(f"{_subject(result, comparisons)} {WORDS[verdict_on(comparisons)]}")
    return [*lines, *warning, f"kept: {kept_words(result)}"]


def _others_of(result: OrderResult) -> list[str]:
    """Return a line for each other device's network, the best here first."""
    lines, column = [], column_of(result.others, result.test_samples or 0, result.test_groups)
    for name, one in sorted(result.others.items(), key=lambda item: -item[1].score):
        lines.append(f"the network of {clean(name)} here: {SCORED[result.task].metric} {one.score:.3f}")
        if pair := column.get(name):
            low, high = pair.interval()
            against = f"{pair.difference:+.3f} ({low:+.3f} to {high:+.3f}), {AGAINST_OWN[pair.finding(pair.p)]}"
            lines[-1] += f"; against this device's own {against} (p = {pair.p:.2g}, corrected for {len(column)} networks)"
    return lines


def _auroc_of(result: OrderResult) -> list[str]:
    """Return the line about the AUROC: of what is kept and of ordinary models alone, or that there are too few cases."""
    cases, kept = result.cases, result.auroc_kept
    if kept is None and (cases is None or not result.test_samples):
        return []
    if kept is None:
        return [f"AUROC: too few cases ({cases} event{'s' * (cases != 1)})"]
    between = "" if result.auroc_low is None else f" ({result.auroc_low:.3f} to {result.auroc_high:.3f})"
    words = [f"kept {kept:.3f}{between}"] + ([] if result.auroc_alone is None else [f"alone {result.auroc_alone:.3f}"])
    if result.auroc_gain_alone is not None:
        words.append(f"difference {result.auroc_gain_alone:+.3f}, p = {result.auroc_p_alone:.2g}")
    return [f"AUROC: {', '.join(words)}"]


def _subject(result: OrderResult, comparisons: list[Pair]) -> str:
    """Return what a verdict is about: what makes the kept model another one than its rivals."""
    if {pair.rival for pair in comparisons} == {"common"}:
        return "personalization"
    return "the network" if result.own_choice == "local" else "the federation"


def kept_words(result: OrderResult) -> str:
    """Describe what the device predicts with: one model, or a blend with the weight of each model."""
    if not result.weights:
        return f"the {result.own_choice} model (not chosen)"
    shares = ", ".join(f"{name} {weight:.2f}" for name, weight in result.weights.items())
    if len(result.weights) == 1:
        name = "best ordinary model alone" if result.kept == "alone" else f"{result.kept} model"
        if result.validation_samples:
            return f"the {name} (no other adds to it on {result.validation_samples} samples held out of training)"
        return f"the {name} (the {result.own_choice} one is no better than a constant answer on its training samples)"
    if not result.validation_samples:
        return f"a blend of {shares} (nothing could be held out to weigh them by)"
    return f"a blend of {shares} (weighted on {result.validation_samples} samples held out of training)"
