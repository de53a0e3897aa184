"""Incoming blobs: they survive kill -9, a full disk and lying peers."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import DiskFull, LimitExceeded
from attune.common.wire import malformed as bad
from attune.common.wire.blobs import Blob, read_frames
from attune.common.wire.digest import digest_of, file_name
from attune.fedserver.ports.blobs import Spool
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.uploads import Sink
from tests.raising import malformed

DATA = bytes(range(256)) * 40
DIGEST = digest_of(DATA)
GROWING = f"uploads/peer.{file_name(DIGEST)}"  # file of an upload until it is whole
WHOLE = Blob(f"{GROWING}.complete", DIGEST, len(DATA))


def spool(folder: Path) -> Spool:
    return DiskStorage(folder).spool


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(DATA)), max_size=6), st.sampled_from([1000, 4096, 1 << 20]))
def test_cut_anywhere_any_number_of_times(tmp_path, cuts, frame_bytes):
    source, path = tmp_path / "source", tmp_path / GROWING
    source.write_bytes(DATA)
    (tmp_path / WHOLE.name).unlink(missing_ok=True)
    for cut in [*sorted(cuts), len(DATA)]:
        with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as sink:
            assert sink.offset == (path.stat().st_size if path.exists() else 0)
            for frame in read_frames(source, sink.offset, lambda: frame_bytes):
                sink.write([frame[: max(0, cut - sink.offset)]])
            assert sink.offset == cut
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as sink:
        assert sink.finish() == WHOLE
    assert (tmp_path / WHOLE.name).read_bytes() == DATA


def test_kill_9_loses_nothing_that_was_written(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.uploads import Sink
sink = Sink(DiskStorage(Path(sys.argv[1])).spool, "peer", 10240, sys.argv[2])
sink.write([(bytes(range(256)) * 40)[:7000]])
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path), DIGEST], timeout=60)
    assert result.returncode == -signal.SIGKILL
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as sink:
        assert sink.offset == 7000
        sink.write([DATA[7000:]])
        assert sink.finish().digest == DIGEST


def test_a_torn_tail_is_caught_by_the_digest_and_the_file_goes(tmp_path):
    path = tmp_path / GROWING
    path.parent.mkdir()
    path.write_bytes(DATA[:5000] + bytes(1000))
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as sink:
        assert sink.offset == 6000
        sink.write([DATA[6000:]])
        with pytest.raises(bad.DigestMismatch, match="from the start"):
            sink.finish()
    assert not path.exists()
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as again:
        assert again.offset == 0


def test_an_unfinished_upload_stays(tmp_path):
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST, who="device kiel")) as sink:
        sink.write([DATA[:10], b"", DATA[10:20]])
        with pytest.raises(bad.Truncated, match="device kiel: 20 of 10240 bytes arrived; go on at offset 20"):
            sink.finish()
        sink.write([DATA[20:]])
        assert sink.offset == len(DATA)
    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as done:
        assert done.offset == len(DATA)
        assert done.finish() == WHOLE


def test_lies_about_size_and_digest(tmp_path):
    path = tmp_path / GROWING
    with malformed("bad-digest"):
        Sink(spool(tmp_path), "peer", 10, "../x")
    for size in (-1, 101):
        with pytest.raises(LimitExceeded):
            Sink(spool(tmp_path), "peer", size, DIGEST, max_bytes=100)
    assert list(tmp_path.iterdir()) == []
    with closing(Sink(spool(tmp_path), "peer", 10, DIGEST)) as sink:
        sink.write([b"12345"])
        with pytest.raises(LimitExceeded, match="sent 11 bytes after it had announced 10"):
            sink.write([b"678", b"901"])
        assert sink.offset == path.stat().st_size == 5
    path.write_bytes(b"longer than announced")
    with closing(Sink(spool(tmp_path), "peer", 10, DIGEST)) as sink:
        assert sink.offset == path.stat().st_size == 0


def test_a_disk_that_fills_up_keeps_offset_and_file_in_step(tmp_path, monkeypatch):
    path = tmp_path / GROWING
    real, left = os.pwrite, [6000]

    def scarce(fd: int, data: memoryview, offset: int) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(fd, data[: min(left[0], 2500)], offset)
        left[0] -= count
        return count

    with closing(Sink(spool(tmp_path), "peer", len(DATA), DIGEST)) as sink:
        monkeypatch.setattr(os, "pwrite", scarce)
        with pytest.raises(DiskFull, match="free some space"):
            sink.write([DATA[:5000], DATA[5000:]])
        assert sink.offset == path.stat().st_size == 6000
        monkeypatch.setattr(os, "pwrite", real)
        sink.write([DATA[6000:]])
        assert sink.finish().digest == DIGEST


def test_too_small_a_disk_is_noticed_up_front(tmp_path):
    with pytest.raises(DiskFull, match="free another"):
        Sink(spool(tmp_path), "peer", 1 << 60, DIGEST)
