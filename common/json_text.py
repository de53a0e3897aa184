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
