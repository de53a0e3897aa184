"""JSON of peers and of files, read into typed structs: whatever is wrong with it, one kind of error says so."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def from_json(text: bytes | str, kind: type[T]) -> T:
    """Errors: msgspec.DecodeError, also for what is no UTF-8 or too deep, for which msgspec has other errors."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UnicodeError:
        raise msgspec.DecodeError("it is no UTF-8") from None
    except RecursionError:
        raise msgspec.DecodeError("it is too deep") from None


LONGEST = 500  # characters; an error of ours is shorter
CUT = "..."


def clean(text: str, longest: int = LONGEST) -> str:
    """`text` with a space for every character that is not printable, and cut to `longest` characters.

    Not printable are controls and escapes (which move cursors), line ends of all kinds (which forge lines), and marks of
    direction (which show other text than there is): the categories C and Z of Unicode, less the space.
    """
    cut = len(text) > longest
    shown = "".join(character if character.isprintable() else " " for character in text[:longest])
    return f"{shown[: longest - len(CUT)]}{CUT}" if cut else shown
