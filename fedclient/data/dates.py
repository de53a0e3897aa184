"""Dates in cells, as days since an origin."""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Any

from attune.common.schema import DateForm

_DAY_S = 86_400
_CLOCK = r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d{1,9})?))?(?:Z|[+-]\d{2}:?\d{2})?)?"
_BIG_FIRST = re.compile(rf"(\d{{4}})([-/])(\d{{1,2}})\2(\d{{1,2}}){_CLOCK}")
_DOTTED = re.compile(rf"(\d{{1,2}})\.(\d{{1,2}})\.(\d{{4}}){_CLOCK}")
_STROKES = re.compile(rf"(\d{{1,2}})/(\d{{1,2}})/(\d{{4}}){_CLOCK}")


def days_of(cell: Any, origin: date, form: DateForm) -> float:
    """Return the days from the origin to the date in a cell that is not missing; a time of day is a part of a day.

    Raises:
        ValueError: It holds no date, or one with strokes whose order of day and month `form` does not say.
    """
    if isinstance(cell, datetime):
        return (cell.date() - origin).days + _share(cell.time())
    if isinstance(cell, date):
        return float((cell - origin).days)
    text = cell.strip() if isinstance(cell, str) else ""
    if match := _BIG_FIRST.fullmatch(text):
        return _days(origin, match[1], match[3], match[4], *match.groups()[4:])
    if match := _DOTTED.fullmatch(text):
        return _days(origin, match[3], match[2], match[1], *match.groups()[3:])
    if form != "year-month-day" and (match := _STROKES.fullmatch(text)):
        day, month = (match[1], match[2]) if form == "day/month/year" else (match[2], match[1])
        return _days(origin, match[3], month, day, *match.groups()[3:])
    raise ValueError("it is no date")


def has_strokes(cell: Any) -> bool:
    """Return whether a cell is a date such as 3/4/2024, whose order of day and month must be known."""
    return isinstance(cell, str) and _STROKES.fullmatch(cell.strip()) is not None


def _days(origin: date, year: str, month: str, day: str, *clock: str | None) -> float:
    hours, minutes, seconds = (float(part or 0) for part in clock)
    if not (hours < 24 and minutes < 60 and seconds < 60):
        raise ValueError("it is no time of day")
    return (date(int(year), int(month), int(day)) - origin).days + (hours * 3600 + minutes * 60 + seconds) / _DAY_S


def _share(clock: time) -> float:
    return (clock.hour * 3600 + clock.minute * 60 + clock.second + clock.microsecond / 1e6) / _DAY_S
