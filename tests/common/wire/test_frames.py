"""Files as frames."""

from __future__ import annotations

import pytest

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
