"""Files as frames."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attune.common.text import from_json
from attune.common.wire import malformed as bad
from attune.common.wire.blobs import read_frames

DATA = bytes(range(256)) * 40


def test_frames_of_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    assert list(read_frames(path, 240, lambda: 5000)) == [DATA[240:5240], DATA[5240:]]
    assert list(read_frames(path, len(DATA))) == []
    for offset in (-1, len(DATA) + 1):
        with pytest.raises(bad.BadOffset):
            read_frames(path, offset)
    with pytest.raises(FileNotFoundError):
        read_frames(tmp_path / "absent", 0)


# --- unreadable JSON has one kind of error, for every fault


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b'{"\xc3": 1}', b"\xff", b"[" * 100_000, '{"a": "\ud800"}'])
def test_what_cannot_be_read_is_a_decode_error(text: bytes | str) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_json(text, Any)


def test_what_is_whole_is_read() -> None:
    assert from_json('{"a": ["\u00e9"]}'.encode(), dict[str, list[str]]) == {"a": ["\u00e9"]}
    with pytest.raises(msgspec.ValidationError):
        from_json(b"1", str)
