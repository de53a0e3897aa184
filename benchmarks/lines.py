"""Rows of a paper's table in one column: the printed figure, our runs of it, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.tables import Column, Table, printed

NEAR = 1.0  # largest difference, in points, at which a printed figure holds


@dataclass(frozen=True)
class Line:
    """Row of the paper in one column: the printed cell, and our runs of it, one for each seed, in per cent."""

    row: str
    printed: float | None
    ours: tuple[float, ...]
    over_clients: tuple[float, ...]
    seeds: int  # number of seeds that the table asks for
    settings: str
    lead: bool = False  # the figures are differences, so their sign counts too
    constant: float | None = None  # accuracy of a constant answer, in the same mean
    last: tuple[float, ...] = ()  # ours after the last round, if the table shows it beside the best round
    worse_off: tuple[float, ...] = ()  # clients worse off than with Local or FedAvg, in per cent, for the runs with this record

    @property
    def mean(self) -> float:
        """Mean over seeds.

        Raises:
            StatisticsError: There is no run.
        """
        return fmean(self.ours)

    @property
    def verdict(self) -> str:
        """Verdict on the printed cell: it holds if our mean is within NEAR of it.

        With several seeds it is not decided if the mean is not within NEAR, but one of the runs is.
        """
        if self.printed is None or not self.ours:
            return ""
        near = [self._is_near(each, self.printed) for each in (self.mean, *self.ours)]
        return self._counted("holds" if near[0] else "not decided" if any(near) else "does not")

    def _is_near(self, found: float, printed: float) -> bool:
        return abs(found - printed) <= NEAR and (not self.lead or found * printed > 0)

    @property
    def no_better(self) -> bool:
        """True if our mean is no better than a constant answer."""
        return self.constant is not None and bool(self.ours) and self.mean <= self.constant

    def direction(self, reference: Line) -> str:
        """Return the verdict on the order of two cells.

        It holds if our mean is on the printed side of the reference by more than NEAR. With a smaller difference it is not
        decided.
        """
        if self.printed is None or reference.printed is None or not (self.ours and reference.ours) or self == reference:
            return ""
        claimed, found = reference.printed - self.printed, reference.mean - self.mean
        return self._counted("not decided" if abs(found) <= NEAR else "holds" if claimed * found > 0 else "does not")

    def _counted(self, said: str) -> str:
        return said if len(self.ours) >= self.seeds else f"{said} ({len(self.ours)} of {self.seeds} seeds)"


def lines_of(table: Table, name: str, column: Column, rows: Sequence[Mapping[str, str]]) -> list[Line]:
    """Return the rows of a column that were run, in the order of the table. A method's common model follows it."""
    paper = printed(name)
    found = []
    for row in table.row:
        runs = [each for each in rows if (each["row"], each["column"]) == (row.name, column.name)]
        shown = [
            (row.name, table.figure, table.over_clients),
            *([(row.common, table.common_figure, "common")] if row.common else []),
        ]
        for printed_name, figure, over_clients in shown:
            found.append(
                Line(
                    printed_name,
                    paper.get((printed_name, column.name)),
                    tuple(100 * float(run[figure]) for run in runs),
                    tuple(100 * float(run[over_clients]) for run in runs if run[over_clients]),
                    len(table.seeds(row, column)),
                    settings_of(row.method, row.set, runs),
                    last=tuple(100 * float(run[table.last]) for run in runs) if table.last else (),
                    constant=100 * fmean(float(run["constant_over_samples"]) for run in runs) if runs else None,
                    worse_off=tuple(100 * float(run["worse_off"]) for run in runs if run["worse_off"])
                    if printed_name == row.name
                    else (),
                )
            )
    return found


def settings_of(method: str, always: Sequence[str], runs: Sequence[Mapping[str, str]]) -> str:
    """Return the settings of a row's runs as text.

    `always` has the settings of the row, without those of rounds except the number of training clients; the others were chosen.
    """
    said = (runs[0]["settings"] if runs else "").split()
    shown = [each for each in said if not each.startswith("round.") or (each in always and each.startswith("round.train="))]
    return f"`{method}`" + (f" `{' '.join(shown)}`" if shown else "")


def constant(rows: Iterable[Mapping[str, str]], column: Column) -> Line | None:
    """Return the accuracy of a constant answer."""
    runs = {each["seed"]: each for each in rows if each["column"] == column.name}.values()
    if not runs:
        return None
    pooled = tuple(100 * float(run["constant_over_samples"]) for run in runs)
    return Line("a constant answer", None, pooled, tuple(100 * float(run["constant"]) for run in runs), len(column.seeds), "")


def leads(table: Table, column: Column, rows: Sequence[Mapping[str, str]]) -> list[Line]:
    """Return the points by which one row is ahead of others, seed by seed, for leads that a figure prints and that were run.

    A method's common model is measured only after the last round, so the leader is taken after the last round too.
    """
    if table.leads is None:
        return []
    ran = {(each["row"], each["seed"]): each for each in rows if each["column"] == column.name}
    found = []
    for (name, place), lead in printed(table.leads.printed).items():
        row = next((each for each in table.row if name in (each.name, each.common)), None)
        if place != column.name or row is None:
            continue
        ours, theirs = ("over_samples", table.common_figure) if name == row.common else (table.figure, table.figure)
        both = [(ran.get((table.leads.row, str(seed))), ran.get((row.name, str(seed)))) for seed in table.seeds(row, column)]
        ahead = tuple(100 * (float(mine[ours]) - float(other[theirs])) for mine, other in both if mine and other)
        if ahead:
            found.append(Line(name, lead, ahead, (), len(both), "", lead=True))
    return found
