"""Dates in cells, as days since an origin."""

from __future__ import annotations

import re
import unicodedata
from datetime import date, datetime, time, timezone
from typing import Any

import numpy as np

from attune.common.schema import DateForm
from attune.fedclient.data.cells import written

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
        return (moment.date() - origin).days + _share(moment.time())
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


def _share(clock: time) -> float:
    return (clock.hour * 3600 + clock.minute * 60 + clock.second + clock.microsecond / 1e6) / _DAY_S
