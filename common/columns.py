"""Names of the columns of a table or of the channels of a series: what is wrong with some, and how two lists of them differ."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NAME = 256  # characters
MAX_NAMES_BYTES = 1 << 20  # of all names together
_SHOWN = 3


def wrong_with(names: Sequence[str], width: int) -> str:
    """What is wrong with the names of `width` columns; empty if nothing is. Short, whatever the names are."""
    if len(names) != width:
        return f"{len(names)} column names for {width} columns"
    if sum(map(len, names)) > MAX_NAMES_BYTES:
        return f"column names of more than {MAX_NAMES_BYTES} characters together"
    if any(not name or len(name) > LONGEST_NAME or not name.isprintable() for name in names):
        return f"a column name that is empty, has more than {LONGEST_NAME} characters, or cannot be printed"
    if len(set(names)) < len(names):
        return "a column name twice"
    return ""


def difference(own: Sequence[str], expected: Sequence[str]) -> str:
    """How `own` differs from `expected`, as a clause about who has `own`; empty if they agree, or one of them is unknown."""
    if not own or not expected or list(own) == list(expected):
        return ""
    lacking = [name for name in expected if name not in set(own)]
    more = [name for name in own if name not in set(expected)]
    if lacking or more:
        said = [f"lacks the columns {_some(lacking)}"] if lacking else []
        return " and ".join(
            [*said, *([f"has {_some(more)} instead" if lacking else f"has {_some(more)} besides"] if more else [])]
        )
    at = next(place for place, (mine, theirs) in enumerate(zip(own, expected, strict=True)) if mine != theirs)
    return f"has the columns in another order: column {at + 1} is {own[at]!r}, and {expected[at]!r} is expected there"


def remedy(expected: Sequence[str]) -> str:
    """What to do about a difference."""
    listed = ",".join(expected)
    what = f"--columns {listed}" if len(listed) <= LONGEST_NAME else "--columns with the federation's columns, in their order"
    return f"cut the shard again with fedclient shard FILE --label NAME {what}"


def _some(names: Sequence[str]) -> str:
    first = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{first}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
