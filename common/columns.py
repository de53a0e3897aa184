"""Column names of a table, or channel names of a series: their checks, and the difference between two lists of them."""

from __future__ import annotations

from collections.abc import Sequence

from attune.common.text import listed

LONGEST_NAME = 256  # characters
MAX_NAMES_BYTES = 1 << 20  # of all names together
_SHOWN = 3


def wrong_with(names: Sequence[str], width: int) -> str:
    """Describe what is wrong with the names of `width` columns; empty if they are right. The text is always short."""
    if len(names) != width:
        return f"{len(names)} column names for {width} columns"
    if sum(map(len, names)) > MAX_NAMES_BYTES:
        return f"column names of more than {MAX_NAMES_BYTES} characters together"
    if any(not name or len(name) > LONGEST_NAME or not name.isprintable() for name in names):
        return f"a column name that is empty, has more than {LONGEST_NAME} characters, or cannot be printed"
    if len(set(names)) < len(names):
        return "a column name twice"
    return ""


def difference(names: Sequence[str], expected: Sequence[str]) -> str:
    """Describe how names differ from the expected ones, as a clause about their owner; empty if either list is empty."""
    if not names or not expected or list(names) == list(expected):
        return ""
    lacking = [name for name in expected if name not in set(names)]
    more = [name for name in names if name not in set(expected)]
    if lacking or more:
        clauses = [f"lacks the columns {listed([repr(name) for name in lacking], _SHOWN)}"] if lacking else []
        if more:
            clauses.append(f"has {listed([repr(name) for name in more], _SHOWN)} {'instead' if lacking else 'besides'}")
        return " and ".join(clauses)
    at = next(place for place, (name, other) in enumerate(zip(names, expected, strict=True)) if name != other)
    return f"has the columns in another order: column {at + 1} is {names[at]!r}, and {expected[at]!r} is expected there"


def remedy(expected: Sequence[str]) -> str:
    """Return what the owner of the shard can do about a difference."""
    listed = ",".join(expected)
    what = f"--columns {listed}" if len(listed) <= LONGEST_NAME else "--columns with the federation's columns, in their order"
    return f"cut the shard again with fedclient shard FILE --label NAME {what}"
