"""Text: JSON of peers and files as typed structs, a peer's words before a person or a log sees them, and aligned tables."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from attune.common.errors import SettingError

T = TypeVar("T")
LONGEST = 500  # characters; our own errors are shorter
CUT = "..."
_BUILT: Final = set[Any]()  # types that msgspec knows
_BUILDING: Final = threading.Lock()


class _Formatted(msgspec.Struct):
    format: int = 1
    version: int = 1  # some files call it so


def newer_format(text: bytes, path: Path, program: str, known: int = 1) -> str:
    """Return the error for a kept JSON object of a later format than `known`, in one line; empty if this version reads it.

    An object without a format is of format 1: earlier versions left it out.

    Args:
        text: Content of the file.
        path: The file.
        program: The command that writes it.
        known: The newest format that this version reads.

    Raises:
        msgspec.DecodeError: It is no such object.
    """
    kept = from_json(text, _Formatted)
    return (
        f"{path} was written by a newer version of {program}: update {program}"
        if max(kept.format, kept.version) > known
        else ""
    )


def _built(kind: type[T]) -> type[T]:
    """Return the type when msgspec knows it and all types that it names.

    msgspec learns a type at its first use. Two threads that use it first at the same time end the process by a segmentation
    fault (msgspec 0.22), so one thread learns at a time.
    """
    if kind not in _BUILT:
        with _BUILDING:
            msgspec.json.Decoder(kind)
            _BUILT.add(kind)
    return kind


def converted(values: object, kind: type[T], *, strict: bool = True) -> T:
    """Return plain values as a typed struct, from any thread.

    Args:
        values: Mappings, sequences, numbers and text.
        kind: The struct.
        strict: Text is no number.

    Raises:
        msgspec.ValidationError: They do not fit.
    """
    return msgspec.convert(values, _built(kind), strict=strict)


def from_json(text: bytes | str, kind: type[T]) -> T:
    """Decode JSON into a typed struct, from any thread.

    Raises:
        msgspec.DecodeError: Also for text that is not UTF-8 or too deep, for which msgspec itself has other errors.
    """
    try:
        return msgspec.json.decode(text, type=_built(kind))
    except UnicodeError:
        raise msgspec.DecodeError("it is no UTF-8") from None
    except RecursionError:
        raise msgspec.DecodeError("it is too deep") from None


def clean(text: str, longest: int = LONGEST) -> str:
    """Return one line of plain text: a space for every character that is not printable, cut to `longest` characters.

    Characters that are not printable are controls and escapes (which move the cursor), line ends of all kinds (which forge
    lines) and direction marks (which hide the true text): the Unicode categories C and Z, except the space.
    """
    cut = len(text) > longest
    shown = "".join(character if character.isprintable() else " " for character in text[:longest])
    return f"{shown[: longest - len(CUT)]}{CUT}" if cut else shown


def listed(words: Sequence[str], most: int = 8) -> str:
    """Return the first `most` words, separated by commas, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def csv_cell(value: object) -> object:
    """Return a value for a CSV file. Text that a spreadsheet would run as a formula gets an apostrophe before it.

    A sign alone is no formula, and it can be the name of a class.
    """
    if not isinstance(value, str) or len(value) < 2 or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table without rules. The columns at the places `left` are aligned to the left.

    Rows after the first may have fewer cells.
    """
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def host_and_port(text: str) -> tuple[str, int | None]:
    """Read `host`, `host:port`, `[::1]` or `[::1]:port`; the host keeps its brackets.

    Raises:
        SettingError: The text has another form.
    """
    parts = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?", text)
    if parts is None or (parts[2] and not 0 < int(parts[2]) < 65536):
        raise SettingError(
            f"setting server.advertise takes HOST or HOST:PORT, such as fed.example.org or [2001:db8::1]:50051, not {text!r}"
        )
    return parts[1], int(parts[2]) if parts[2] else None
