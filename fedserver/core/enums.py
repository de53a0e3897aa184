"""Enums whose members are their text."""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """As enum.StrEnum, which Python 3.10 does not have: `str`, `format` and `%` give the value."""

    __str__ = str.__str__
