"""A row of a paper's table in one column: the printed figure beside our runs of it, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.tables import Column, Table, printed

NEAR = 1.0  # points: as far from a printed figure as ours may be


@dataclass(frozen=True)
class Line:
    """A row of the paper in one column: the printed cell, and our runs of it, one a seed, in per cent."""

    row: str
    printed: float | None
    ours: tuple[float, ...]
    over_clients: tuple[float, ...]
    seeds: int  # that the table asks for
    settings: str

    @property
    def mean(self) -> float:
        """Over seeds. Errors: StatisticsError without a run."""
        return fmean(self.ours)

    @property
    def verdict(self) -> str:
        """holds: within NEAR of the printed cell. With several seeds not decided: their mean is not, but one of them is."""
        if self.printed is None or not self.ours:
            return ""
        near = [abs(each - self.printed) <= NEAR for each in (self.mean, *self.ours)]
        return self._counted("holds" if near[0] else "not decided" if any(near) else "does not")

    def direction(self, reference: Line) -> str:
        """holds: on the printed side of the reference, by more than NEAR. Not decided: by less."""
        if self.printed is None or reference.printed is None or not (self.ours and reference.ours) or self == reference:
            return ""
        claimed, found = reference.printed - self.printed, reference.mean - self.mean
        return self._counted("not decided" if abs(found) <= NEAR else "holds" if claimed * found > 0 else "does not")

    def _counted(self, said: str) -> str:
        return said if len(self.ours) >= self.seeds else f"{said} ({len(self.ours)} of {self.seeds} seeds)"


def lines_of(table: Table, name: str, column: Column, rows: Sequence[Mapping[str, str]]) -> list[Line]:
    """What was run of a column, in the order of the table, a method's common model below it."""
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
                    settings_of(row.method, runs),
                )
            )
    return found


def settings_of(method: str, runs: Sequence[Mapping[str, str]]) -> str:
    said = " ".join(each for each in (runs[0]["settings"] if runs else "").split() if not each.startswith("round."))
    return f"`{method}`" + (f" `{said}`" if said else "")


def constant(rows: Iterable[Mapping[str, str]], column: Column) -> Line | None:
    """What a constant answer reaches."""
    runs = {each["seed"]: each for each in rows if each["column"] == column.name}.values()
    if not runs:
        return None
    pooled = tuple(100 * float(run["constant_over_samples"]) for run in runs)
    return Line("a constant answer", None, pooled, tuple(100 * float(run["constant"]) for run in runs), len(column.seeds), "")


def leads(table: Table, column: Column, lines: Sequence[Line]) -> list[Line]:
    """By how many points one row is ahead of others, of those leads that a figure prints and both of whose rows were run."""
    if table.leads is None:
        return []
    paper, ran = printed(table.leads.printed), {line.row: line for line in lines if line.ours}
    leader = ran.get(table.leads.row)
    return [
        Line(row, lead, (leader.mean - ran[row].mean,), (), 1, "")
        for (row, name), lead in paper.items()
        if name == column.name and row in ran and leader
    ]
