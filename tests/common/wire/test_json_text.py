"""Unreadable JSON has one kind of error, for every fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attune.common.text import from_json


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b'{"\xc3": 1}', b"\xff", b"[" * 100_000, '{"a": "\ud800"}'])
def test_what_cannot_be_read_is_a_decode_error(text: bytes | str) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_json(text, Any)


def test_what_is_whole_is_read() -> None:
    assert from_json('{"a": ["\u00e9"]}'.encode(), dict[str, list[str]]) == {"a": ["\u00e9"]}
    with pytest.raises(msgspec.ValidationError):
        from_json(b"1", str)
