"""Values that stand for nothing, such as 999 among ages and 9999-12-31 among dates of discharge.

N samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.schema import ORIGIN, DateForm
from attune.common.text import listed
from attune.fedclient.data.cells import number_of, written
from attune.fedclient.data.dates import days_of

NUMBERS = frozenset(
    sign * int(digit * length)
    for digit in "789"
    for length in range(1, 9)
    for sign in (1, -1)
    if sign < 0 or length > 1 or digit == "9"
) | {-1}
_DAYS = ("0001-01-01", "1111-11-11", "1582-10-15", "1753-01-01", "1800-01-01", "1899-12-30", "1899-12-31", "1900-01-01",
         "1901-01-01", "1970-01-01", "2079-06-06", "2099-12-31", "2100-01-01", "2999-12-31", "9999-12-31")  # fmt: skip
_ORIGIN = date.fromisoformat(ORIGIN)
DAYS = frozenset(float((date.fromisoformat(day) - _ORIGIN).days) for day in _DAYS)
_POSSIBLE = tuple(float((date(year, 1, 1) - _ORIGIN).days) for year in (1850, 2150))
_FEWEST = 10  # other values
_MANY_VALUES = 5  # that a column has, so that one far from them is strange whatever it is
_FAR, _STEPS, _OFTEN = 10, 5, 5
_SAMPLE, _FEWEST_SAMPLES = 1 << 20, 1000  # values that are looked at, and samples in any case
Floats = npt.NDArray[np.float64]


def strange_numbers(values: Floats, usual: Collection[float] = NUMBERS) -> list[float]:
    """Return the values, of (N,) without NaN, that seem to stand for nothing.

    They are rarer than the others, and lie away from them by more than these differ: a usual mark once or more, any other
    number if it is repeated and much farther away. A zero stands alone before numbers that begin far above it.
    """
    different, counts = np.unique(values, return_counts=True)
    ends = {*different[:2].tolist(), *different[-2:].tolist(), *(value for value in different.tolist() if value in usual), 0}
    strange = []
    for value, count in zip(different.tolist(), counts.tolist(), strict=True):
        if value not in ends or 2 * count > len(values) or len(values) - count < _FEWEST:
            continue
        if value not in usual and count < (
            2 if value == 0 else 3
        ):  # it is not strange, and most columns have no more than that
            continue
        others = different[(different != value) & ~np.isin(different, list(usual))]
        if len(others) < 2:
            continue
        rest = values[np.isin(values, others)]
        low, high = np.quantile(rest, [0.05, 0.95])
        gap = max(others[0] - value, value - others[-1])
        away, spread = max(low - value, value - high), max(high - low, others[1] - others[0])
        if value == 0:
            is_strange = count > 1 and gap > max(0.3 * spread, _STEPS * np.median(np.diff(others)))
        elif value in usual:
            is_strange = gap > 0 and (value < 0 <= others[0] or (away > spread and (count > 1 or away > 3 * spread)))
        else:
            is_strange = count > 2 and len(others) >= _MANY_VALUES and gap > 0 and away > _FAR * spread
        if is_strange:
            strange.append(value)
    return strange


def strange_days(days: Floats) -> list[float]:
    """Return the days since ORIGIN, of (N,) without NaN, that seem to stand for no date: usual ones, or far from all others."""
    different, counts = np.unique(days, return_counts=True)
    often = _OFTEN * np.median(counts)
    inside = [day for day in different if day not in DAYS]
    strange = set(strange_numbers(days, ()))
    for day, count in zip(different.tolist(), counts.tolist(), strict=True):
        outside = bool(inside) and not inside[0] <= day <= inside[-1]
        impossible = not _POSSIBLE[0] <= day <= _POSSIBLE[1] and 2 * count < len(days)
        if impossible or (day in DAYS and count > 1 and (outside or count > often)):
            strange.add(day)
    return sorted(strange)


def of_numbers(x: npt.NDArray[Any], names: Sequence[str]) -> list[str]:
    """Return a finding about features or targets, (N, F), in which numbers stand for nothing."""
    marks = {}
    step = max(1, len(x) // max(_FEWEST_SAMPLES, _SAMPLE // max(1, len(names))))
    for column, name in zip(x[::step].T, names, strict=True):
        values = column.astype(np.float64)
        if strange := strange_numbers(values[np.isfinite(values)]):
            marks[name] = [written(value) for value in strange]
    return _said(marks)


def of_cells(columns: Mapping[str, Sequence[Any]], forms: Mapping[str, DateForm]) -> list[str]:
    """Return a finding about columns, by name, of cells that are not missing. Those with a form hold dates, others numbers."""
    marks = {}
    for name, all_cells in columns.items():
        cells = all_cells[:: max(1, len(all_cells) // (_SAMPLE // len(columns)))]
        form = forms.get(name)
        parse: Callable[[Any], float] = number_of if form is None else _days_in(form)
        read: dict[float, Any] = {}
        values = []
        for cell in cells:
            try:
                values.append(parse(cell))
            except (ValueError, OverflowError):
                continue
            read.setdefault(values[-1], cell)
        numbers = np.array(values, dtype=np.float64)
        strange = strange_numbers(numbers[np.isfinite(numbers)]) if form is None else strange_days(numbers)
        if strange:
            marks[name] = [written(read[value]) for value in strange]
    return _said(marks)


def _days_in(form: DateForm) -> Callable[[Any], float]:
    return lambda cell: days_of(cell, _ORIGIN, form)


def _said(marks: dict[str, list[str]]) -> list[str]:
    if not marks:
        return []
    where = listed([f"{', '.join(values)} in {name}" for name, values in marks.items()])
    first = next(iter(marks.values()))[0]
    return [
        f"values far from all others may stand for nothing: {where}. If so, say --missing-words usual,{first}, or all others "
        "become nearly one value"
    ]
