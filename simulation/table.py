"""A row for each device, in a form that prints well and that pandas takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from attune.common.statistics import Finding, interval_of
from attune.fedclient.messages import Result
from attune.fedclient.work.comparison import comparisons_of, finding_of


@dataclass(frozen=True)
class Row:
    """Accuracies are fractions of the device's own test part; None: there is no such model, or no test part. Of other
    tasks they are R2 or label accuracy (common.task), and R2 has no interval.

    accuracy: of the model that the method leads to, which is one of the three; interval: its 95 %. constant: of a constant
    answer, the best for the training part. verdict: the model against the others.
    """

    device: str
    samples: int
    local: float | None
    common: float | None
    personalized: float | None
    accuracy: float | None
    constant: float | None
    interval: tuple[float, float] | None
    verdict: Finding | None


class Table(Sequence[Row]):
    """Rows by the devices' names."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        """Columns under each other, and a line of means."""
        names = [field.name for field in fields(Row)]
        lines = [names, *(_cells(row) for row in self._rows), ["mean", "", *(_text(self.mean(name)) for name in names[2:7])]]
        widths = [max(len(line[at]) for line in lines if at < len(line)) for at in range(len(names))]
        return "\n".join(_line(line, widths) for line in lines)

    def mean(self, column: str) -> float | None:
        """Of an accuracy over the devices that have it; every device counts the same."""
        found = [value for row in self._rows if (value := getattr(row, column)) is not None]
        return sum(found) / len(found) if found else None

    def to_pandas(self) -> Any:
        """A DataFrame, for which pandas must be installed; the interval becomes two columns, low and high."""
        import pandas

        rows = [asdict(row) | dict(zip(("low", "high"), row.interval or (None, None), strict=True)) for row in self._rows]
        return pandas.DataFrame(rows).drop(columns="interval").set_index("device")


def row_of(name: str, result: Result) -> Row:
    """A device's row, from the result of its last order."""
    found = result.accuracies
    own, samples = found[result.own], result.test_samples or 0
    comparisons = comparisons_of(result)
    return Row(
        device=name,
        samples=result.samples,
        local=found.get("local"),
        common=found.get("common"),
        personalized=found.get("personalized"),
        accuracy=own,
        constant=result.accuracy_constant,
        interval=None if own is None or not samples else interval_of(own, samples, result.task),
        verdict=finding_of(comparisons) if comparisons else None,
    )


def _cells(row: Row) -> list[str]:
    interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
    accuracies = [_text(value) for value in (row.local, row.common, row.personalized, row.accuracy, row.constant)]
    return [row.device, str(row.samples), *accuracies, interval, row.verdict or "-"]


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ).rstrip()
