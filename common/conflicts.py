"""Rows of features that cannot be combined. The list is in `fedserver.core.conflicts`; devices check the rows of their work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attune.common.errors import SettingError


class Conflict(NamedTuple):
    """Two features that cannot be combined, or a setting that a feature needs.

    Attributes:
        sentence: Text that names both; `{s}` in it stands for the settings, and `{why}` for the answer of `holds`.
        holds: Returns whether the settings have both, or why they have.
    """

    sentence: str
    holds: Callable[[Any], object]


def check(conflicts: Iterable[Conflict], settings: Any) -> None:
    """Check that the settings have none of these conflicts.

    Raises:
        SettingError: They have one; the error is its sentence.
    """
    for conflict in conflicts:
        if why := conflict.holds(settings):
            raise SettingError(conflict.sentence.format(s=settings, why=why))
