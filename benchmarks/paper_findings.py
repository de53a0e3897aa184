"""Sentences on the papers' tables for docs/reference.md: every figure in them is read from a result file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lines import Line, constant, lines_of
from benchmarks.paper import CELLS, OUT
from benchmarks.result_file import Results
from benchmarks.tables import Column, load

WIDTH = 140
NAMES = {"FedAvg-T+FT": "tuned FedAvg", "FedTP x MCSA, dial": "FedTP x MCSA with the dial"}
SIGMA = "FedMCSA, sigma "
CONSTANT = "a constant answer"


@dataclass(frozen=True)
class Findings:
    """Lines of one table's columns, by row.

    `results` is the folder with the table's file.
    """

    table: str
    results: Path = OUT
    _lines: dict[str, dict[str, Line]] = field(default_factory=dict)

    def lines(self, column: str) -> dict[str, Line]:
        """Return the rows of a column that were run, and the constant answer."""
        if column not in self._lines:
            table, rows = load(self.table), Results(self.results / f"{self.table}.csv", CELLS).rows()
            place = next(place for place in table.column if place.name == column)
            lines = [line for line in lines_of(table, self.table, place, rows) if line.ours]
            self._lines[column] = {line.row: line for line in (*lines, _constant(rows, place))}
        return self._lines[column]

    def mean(self, column: str, row: str) -> str:
        """Return our pooled figure."""
        return f"{self.lines(column)[row].mean:.1f}"

    def means(self, column: str, rows: Sequence[str]) -> str:
        """Return several rows with their figures, as in "FedPer 81.3, Local 78.0"."""
        return ", ".join(f"{NAMES.get(row, row.removesuffix('-T'))} {self.mean(column, row)}" for row in rows)

    def printed(self, column: str, row: str) -> str:
        """Return the paper's figure."""
        return f"{self.lines(column)[row].printed:.2f}"

    def beside(self, column: str, row: str) -> str:
        """Return our figure and the paper's, as in "95.9 for 95.27"."""
        return f"{self.mean(column, row)} for {self.printed(column, row)}"

    def gap(self, column: str, row: str, other: str) -> str:
        """Return the points between two of our rows, without sign."""
        lines = self.lines(column)
        return f"{abs(lines[row].mean - lines[other].mean):.1f}"

    def printed_gap(self, column: str, row: str, other: str) -> str:
        """Return the points between two printed figures, without sign."""
        lines = self.lines(column)
        return f"{abs((lines[row].printed or 0) - (lines[other].printed or 0)):.1f}"

    def by_draw(self, column: str, row: str, other: str) -> list[float]:
        """Return the points by which a row is ahead of another, for each draw."""
        lines = self.lines(column)
        return [mine - theirs for mine, theirs in zip(lines[row].ours, lines[other].ours, strict=True)]

    def harmed(self, column: str, row: str) -> str:
        """Return the mean percentage of harmed clients over the draws."""
        worse = self.lines(column)[row].worse_off
        return f"{sum(worse) / len(worse):.0f}"


def _constant(rows: list[dict[str, str]], column: Column) -> Line:
    line = constant(rows, column)
    assert line is not None, "a table's file has a row for each of its runs"
    return line


def findings(results: Path = OUT) -> Iterator[str]:
    """Yield the paragraphs on all tables, wrapped."""
    for paragraph in (*_fedmcsa(results), *_fedtp_2(results), *_fedtp_others(results), *_pfllib(results)):
        item = paragraph.startswith("- ")
        yield textwrap.fill(
            paragraph, WIDTH, subsequent_indent="  " if item else "", break_long_words=False, break_on_hyphens=False
        )
        if paragraph and not item:
            yield ""


def _fedmcsa(results: Path) -> Iterator[str]:
    one, two, mlr, dnn = Findings("fedmcsa-1", results), Findings("fedmcsa-2", results), "synthetic/mlr", "synthetic/dnn"
    draws = one.lines(mlr)["FedAvg"].ours
    yield (
        "**FedMCSA's Table 1, Synthetic** (three draws, 800 rounds). FedMCSA's own figures hold: "
        f"{one.beside(mlr, 'FedMCSA')} (MLR) and {one.beside(dnn, 'FedMCSA')} (DNN). But Local, which the paper does not "
        f"print, has {one.mean(mlr, 'Local')} and {one.mean(dnn, 'Local')}, and the settings that validation chooses are ones "
        "in which clients hardly mix. So a gain from federating is not shown on these data. FedAvg harms "
        f"{one.harmed(mlr, 'FedAvg')} and {one.harmed(dnn, 'FedAvg')} % of the clients, FedMCSA {one.harmed(mlr, 'FedMCSA')} "
        f"%. The draw counts for more than most methods: FedAvg has {min(draws):.1f} in one draw (printed: "
        f"{one.printed(mlr, 'FedAvg')}) and {max(draws):.1f} in another."
    )
    pull = "HeurFedAMP, lambda 5"
    yield "Cells that do not hold are explained by one changed setting each:"
    yield (
        f"- FedAvg and FedProx with the DNN ({one.mean(dnn, 'FedAvg')} and {one.mean(dnn, 'FedProx')} for "
        f"{one.printed(dnn, 'FedAvg')} and {one.printed(dnn, 'FedProx')}): momentum, which validation chose. Without it "
        f"FedAvg has {two.mean(dnn, 'FedAvg')}."
    )
    yield (
        f"- HeurFedAMP ({one.mean(mlr, 'HeurFedAMP')} and {one.mean(dnn, 'HeurFedAMP')} for {one.printed(mlr, 'HeurFedAMP')} "
        f"and {one.printed(dnn, 'HeurFedAMP')}): validation chose no pull. With the printed pull it has {two.mean(mlr, pull)} "
        f"and {two.mean(dnn, pull)}."
    )
    yield (
        f"- pFedMe ({one.beside(mlr, 'pFedMe(PM)')}): which clients train. If only the sampled ones train, it has "
        f"{two.mean(mlr, 'pFedMe, sampled train')}."
    )
    yield (
        f"- Per-FedAvg with the DNN ({one.beside(dnn, 'Per-FedAvg')}): momentum. Without it, it has "
        f"{two.mean(dnn, 'Per-FedAvg')}."
    )
    yield ""
    mlr, dnn = "mnist/mlr", "mnist/dnn"
    yield (
        f"**FedMCSA's Table 1, MNIST** (one draw, 800 rounds). {_holding(one, mlr)} printed figures hold with the MLR, and "
        f"{_holding(one, dnn)} with the DNN that were run. FedMCSA has {one.beside(mlr, 'FedMCSA')} and "
        f"{one.beside(dnn, 'FedMCSA')}. Local has {one.mean(mlr, 'Local')} and {one.mean(dnn, 'Local')}. FedAvg harms "
        f"{one.harmed(mlr, 'FedAvg')} and {one.harmed(dnn, 'FedAvg')} % of the clients, FedMCSA {one.harmed(mlr, 'FedMCSA')} "
        "%."
    )
    behind = [
        max(line.mean for row, line in two.lines(place).items() if row == "FedMCSA" or row.startswith(SIGMA))
        - two.lines(place)["FedMCSA, dial"].mean
        for place in ("synthetic/mlr", "synthetic/dnn", mlr)
    ]
    yield (
        "**FedMCSA's Table 2** (sigma; the printed settings for every row). On MNIST, FedMCSA turns from the mean of the "
        f"models into Local between sigma 10 ({two.mean(mlr, SIGMA + '10')}) and 50 ({two.mean(mlr, 'FedMCSA')}). On "
        "Synthetic (MLR) each client stays by itself from 50 on. Below the turn FedMCSA harms as many clients as the plain "
        "mean, above it none. The useful range of sigma is narrow and differs between data. [The "
        f"dial](methods/fedmcsa.md#the-dial) needs no such choice: it is at most {max(behind):.1f} points below the best "
        "sigma."
    )


def _holding(table: Findings, column: str) -> str:
    verdicts = [line.verdict for line in table.lines(column).values() if line.printed is not None]
    return f"{sum(verdict == 'holds' for verdict in verdicts)} of {len(verdicts)}"


def _fedtp_2(results: Path) -> Iterator[str]:
    small, place = Findings("fedtp-2-small", results), "pathological"
    leads = ", ".join(f"{lead:+.1f}" for lead in small.by_draw(place, "FedTP", "Local-T"))
    other = "dirichlet0.3"
    yield (
        "**FedTP's Table II in small** (Fashion-MNIST, ten clients, 40 rounds; another task than the paper's). No direction "
        f"is against the paper, but FedTP's lead over Local is small: {leads} points by draw. Under Dirichlet: "
        f"{small.means(other, ('FedTP+KNN', 'FedTP x MCSA', 'FedAvg-T+FT', 'FedTP', 'Local-T'))}. FedAvg harms "
        f"{small.harmed(place, 'FedAvg-T')} and {small.harmed(other, 'FedAvg-T')} % of the clients, FedTP "
        f"{small.harmed(place, 'FedTP')} and {small.harmed(other, 'FedTP')} %."
    )
    two, place, vanilla = Findings("fedtp-2", results), "cifar10/pathological/50", "Vanilla Personalized-T"
    order = ("FedPer-T", vanilla, "FedTP", "FedTP x MCSA, dial", "Local-T", "FedAvg-T")
    yield (
        "**FedTP's reduced Table II** (CIFAR-10, two classes a client, one seed, eight of eleven rows). Tuned FedAvg is first "
        f"with {two.mean(place, 'FedAvg-T+FT')}, then {two.means(place, order)}. The paper has FedTP "
        f"{two.printed_gap(place, 'FedTP', 'FedPer-T')} points above FedPer and {two.printed_gap(place, 'FedTP', vanilla)} "
        "above Vanilla, and no tuned FedAvg. On this task, at this size, nothing shows that q, k, v for each client are "
        f"worth more than fine-tuning. FedTP gives {two.gap(place, 'FedTP', 'Local-T')} points over Local, in the paper "
        f"{two.printed_gap(place, 'FedTP', 'Local-T')}."
    )


def _pfllib(results: Path) -> Iterator[str]:
    board, place = Findings("pfllib", results), "fmnist_dir0.1"
    rounds, rows = load("pfllib").rounds, [row for row in board.lines(place) if row != CONSTANT]
    printed = ", ".join(f"{row} {board.printed(place, row)}" for row in rows)
    yield (
        f"**PFLlib's board**, Fashion-MNIST under Dirichlet 0.1 by its own label counts (one seed, {rounds} rounds, a smaller "
        f"network): {board.means(place, (*rows, CONSTANT))}. The board prints {printed} for the best round of far more. So few "
        "rounds do not say whether its figures hold."
    )


def _fedtp_others(results: Path) -> Iterator[str]:
    five, place = Findings("fedtp-5", results), "cifar10/pathological"
    yield (
        f"**FedTP's Table V** (which layers are generated; one seed). The projections have {five.mean(place, 'FedTP')}, "
        f"normalisation layers {five.mean(place, 'normalization layers')}, MLP layers {five.mean(place, 'mlp layers')}, the "
        f"whole encoder {five.mean(place, 'whole encoder')}. In the paper the projections are first. Some rows still rise "
        "after 200 rounds."
    )
    six = Findings("fedtp-6", results)
    kinds = [
        f"{row} {six.gap(place, row, 'FedTP')} points {side} FedTP (paper: {six.printed_gap(place, row, 'FedTP')})"
        for row, side in (("FedTP+FedPer", "above"), ("FedTP+KNN", "above"), ("FedTP+FedRoD", "below"))
    ]
    yield (
        "**FedTP's Table VI** (extensions; 50 clients, while the printed cells are of 100; one seed) has the paper's "
        f"direction in all three rows: {', '.join(kinds)}. Only the first difference is more than a point."
    )
    seven, place = Findings("fedtp-7", results), "cifar10/0.1"
    yield (
        "**FedTP's Table VII**, alpha 0.1 (one of five columns; 50 clients, while the printed cells are of 100; one seed): "
        f"{seven.means(place, ('FedPer-T', 'Local-T', 'FedTP', 'FedAvg-T', 'a constant answer'))}. The paper has FedTP "
        f"{seven.printed_gap(place, 'FedTP', 'FedPer-T')} points above FedPer. FedTP is still rising after 200 rounds."
    )
    eleven, place = Findings("fedtp-fig11", results), "participation-0.05"
    order = ("FedTP", "Vanilla Personalized-T", "FedTP x MCSA, dial", "Local-T", "FedAvg-T")
    yield (
        "**FedTP's Figure 11**, CIFAR-100, 5 % of the clients a round (one of five columns, one seed): "
        f"{eleven.means(place, order)}. The paper's direction holds."
    )
    ten, place = Findings("fedtp-fig10", results), "noise-5"
    order = ("FedTP", "Vanilla Personalized-T", "Local-T", "FedAvg-T", "a constant answer")
    yield (
        f"**FedTP's Figure 10**, noise 5 (one of five columns, one seed, 40 rounds): {ten.means(place, order)}. Only FedAvg "
        "is behind."
    )
