"""Table of a simulation's result: a row for each device, for printing and for pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from attune.common.statistics import Finding, interval_of
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.comparison import comparisons_of, finding_of


@dataclass(frozen=True)
class Row:
    """One device's accuracies on its own test part.

    Accuracies are fractions, or None if there is no such model or no test part. In other tasks than classes they are R2 or
    label accuracy (common.task).

    Attributes:
        device: Name of the device.
        samples: Number of training samples.
        local: Accuracy of the model that the device trained alone.
        common: Accuracy of the model that all devices share.
        personalized: Accuracy of the device's own model.
        accuracy: Accuracy of the model that the method leads to, which is one of these three.
        constant: Accuracy of the constant answer that is best for the training part.
        interval: 95 % interval of `accuracy`; None for R2.
        verdict: Whether the method's model is better than the others.
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
    """Rows of all devices, sorted by name."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        """Return an aligned table with a line of means at the end."""
        names = [field.name for field in fields(Row)]
        lines = [names, *(_cells(row) for row in self._rows), ["mean", "", *(_text(self.mean(name)) for name in names[2:7])]]
        widths = [max(len(line[at]) for line in lines if at < len(line)) for at in range(len(names))]
        return "\n".join(_line(line, widths) for line in lines)

    def mean(self, column: str) -> float | None:
        """Return the mean of a column of accuracies over the devices that have a value, or None if there are none."""
        values = [value for row in self._rows if (value := getattr(row, column)) is not None]
        return sum(values) / len(values) if values else None

    def to_pandas(self) -> Any:
        """Return a DataFrame, in which the interval has two columns, low and high. Needs pandas."""
        import pandas

        rows = [asdict(row) | dict(zip(("low", "high"), row.interval or (None, None), strict=True)) for row in self._rows]
        return pandas.DataFrame(rows).drop(columns="interval").set_index("device")


def row_of(name: str, result: OrderResult) -> Row:
    """Return a device's row, from the result of its last order."""
    accuracies, samples = result.accuracies, result.test_samples or 0
    accuracy = accuracies[result.own]
    comparisons = comparisons_of(result)
    return Row(
        device=name,
        samples=result.samples,
        local=accuracies.get("local"),
        common=accuracies.get("common"),
        personalized=accuracies.get("personalized"),
        accuracy=accuracy,
        constant=result.accuracy_constant,
        interval=None if accuracy is None or not samples else interval_of(accuracy, samples, result.task),
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
