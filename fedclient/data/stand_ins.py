"""Values that stand for nothing, such as 999 among ages and 9999-12-31 among dates of discharge.

N samples, F features.

Dates in cells are days since an origin.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.schema import ORIGIN, DateForm
from attune.common.text import listed
from attune.fedclient.data.cells import number_of, written

_DAY_S = 86_400
_CLOCK = (
    r"(?:(?:,?[T ]\s*|:)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:\.\d{1,9})?))?"
    r"(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?(?: ?(?P<zone>Z|UTC|GMT|[+-]\d{2}:?\d{2}))?)?"
)
_SHORT_CLOCK = r"(?:T?(?P<hour>\d{2})(?P<minute>\d{2})(?P<second>\d{2})?)?"
_DAY, _MONTH, _YEAR, _WORD = r"(?P<day>\d{1,2})", r"(?P<month>\d{1,2})", r"(?P<year>\d{4})", r"(?P<word>[^\W\d_]{3,10})\.?"
_ANY_YEAR = r"(?P<year>\d{4}|\d{2})"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"{_YEAR}(?P<mark>[-/.]){_MONTH}(?P=mark){_DAY}{_CLOCK}",
        rf"{_DAY}\. ?{_MONTH}\. ?{_ANY_YEAR}{_CLOCK}",
        rf"{_DAY}(?:\. ?|[ -])?{_WORD}[ -]?{_ANY_YEAR}{_CLOCK}",
        rf"{_WORD} {_DAY}(?:st|nd|rd|th)?,? {_YEAR}{_CLOCK}",
        rf"{_YEAR}[ -]{_WORD}[ -]{_DAY}{_CLOCK}",
        rf"{_YEAR}(?P<month>\d{{2}})(?P<day>\d{{2}}){_SHORT_CLOCK}",
    )
)
_COMPACT = _FORMS[-1]
_STROKES = re.compile(rf"(?P<first>\d{{1,2}})(?P<mark>[-/])(?P<second_part>\d{{1,2}})(?P=mark){_ANY_YEAR}{_CLOCK}")
_FIRST_SHORT_YEAR = 1930  # 30 to 99 are 1930 to 1999, as spreadsheet programs read them
TWO_DIGITS = "years of two digits: 00 to 29 are 2000 to 2029, 30 to 99 are 1930 to 1999"
_COMPACT_YEARS = range(1850, 2151)  # outside them eight digits are a number
# English, German, French, Spanish, Italian, Dutch, without accents; three letters or more of a name are enough
_MONTHS = (
    "january januar janvier enero gennaio januari",
    "february februar fevrier febrero febbraio februari",
    "march marz maerz mars marzo maart mrz mrt",
    "april avril abril aprile",
    "may mai mayo maggio mei",
    "june juni juin junio giugno",
    "july juli juillet julio luglio",
    "august aout agosto augustus",
    "september septembre septiembre settembre",
    "october oktober octobre octubre ottobre",
    "november novembre noviembre",
    "december dezember decembre diciembre dicembre",
)


def days_of(cell: Any, origin: date, form: DateForm) -> float:
    """Return the days from the origin to the date in a cell that is not missing; a time of day is a part of a day.

    A time with a zone is that of UTC.

    Raises:
        ValueError: It holds no date, or one with strokes whose order of day and month `form` does not say.
    """
    if isinstance(cell, datetime):
        moment = cell.astimezone(timezone.utc) if cell.tzinfo is not None else cell
        seconds = moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
        return (moment.date() - origin).days + seconds / _DAY_S
    if isinstance(cell, date):
        return float((cell - origin).days)
    text = _text_of(cell)
    for pattern in _FORMS:
        if match := pattern.fullmatch(text):
            return _days(origin, match.groupdict())
    if form != "year-month-day" and (match := _STROKES.fullmatch(text)):
        parts = match.groupdict()
        places = ("first", "second_part") if form == "day/month/year" else ("second_part", "first")
        return _days(origin, {**parts, "day": parts[places[0]], "month": parts[places[1]]})
    raise ValueError("it is no date")


def has_strokes(cell: Any) -> bool:
    """Return whether a cell is a date such as 3/4/2024 or 3-4-2024, whose order of day and month must be known."""
    return isinstance(cell, str) and _STROKES.fullmatch(cell.strip()) is not None


def has_short_year(cell: Any) -> bool:
    """Return whether a cell is a date whose year has two digits."""
    matches = (pattern.fullmatch(_text_of(cell)) for pattern in (*_FORMS, _STROKES))
    return any(match is not None and len(match["year"]) == 2 for match in matches)


def is_compact(cell: Any) -> bool:
    """Return whether a cell is a number or text such as 20241231, which is a date of our time."""
    match = _COMPACT.fullmatch(_text_of(cell))
    if match is None or int(match["year"]) not in _COMPACT_YEARS:
        return False
    try:
        _days(date.min, match.groupdict())
    except ValueError:
        return False
    return True


def _text_of(cell: Any) -> str:
    if isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool):
        return written(cell)
    return cell.strip() if isinstance(cell, str) else ""


def _days(origin: date, parts: dict[str, str | None]) -> float:
    """Return the days from the origin to a date of these parts.

    Raises:
        ValueError: There is no such day, month, or time of day.
    """
    hour, minute, second = (float(parts.get(name) or 0) for name in ("hour", "minute", "second"))
    if half := parts.get("half"):
        if not 1 <= hour <= 12:
            raise ValueError("it is no time of day")
        hour = hour % 12 + 12 * (half in "pP")
    if not (hour < 24 and minute < 60 and second < 60):
        raise ValueError("it is no time of day")
    zone, year = parts.get("zone") or "Z", int(parts["year"] or 0)
    if zone[0] in "+-":
        minute -= int(f"{zone[0]}1") * (60 * int(zone[1:3]) + int(zone[-2:]))
    if len(parts["year"] or "") == 2:
        year = _FIRST_SHORT_YEAR + (year - _FIRST_SHORT_YEAR) % 100
    month = _month_of(parts["word"] or "") if "word" in parts else int(parts["month"] or 0)
    return (date(year, month, int(parts["day"] or 0)) - origin).days + (hour * 3600 + minute * 60 + second) / _DAY_S


def _month_of(word: str) -> int:
    """Return the number of the month whose name begins so.

    Raises:
        ValueError: None does, or several.
    """
    plain = "".join(letter for letter in unicodedata.normalize("NFD", word.casefold()) if not unicodedata.combining(letter))
    months = [at for at, names in enumerate(_MONTHS, 1) if any(name.startswith(plain) for name in names.split())]
    if len(months) != 1:
        raise ValueError("it is no month")
    return months[0]


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
