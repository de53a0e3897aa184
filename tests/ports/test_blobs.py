"""What every store of blobs must do: in a folder, and in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import HomeMismatch, UploadBusy
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.frames import read_frames
from attune.common.wire.malformed import BadOffset, Truncated
from attune.fedserver.ports.blobs import Blobs, Damaged
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.memory import MemoryBlobs

DATA = bytes(range(256)) * 20


class Bench:
    """A store; `restart` makes a new one over the same bytes, as a new process would; `rewrite` damages behind its back."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.blobs: Blobs = FolderBlobs(folder) if kind == "folder" else MemoryBlobs()

    def restart(self) -> Blobs:
        if isinstance(self.blobs, MemoryBlobs):
            again = MemoryBlobs()
            again._data = self.blobs._data
            self.blobs = again
        else:
            self.blobs = FolderBlobs(self.folder)
        return self.blobs

    def rewrite(self, name: str, change: Callable[[bytearray], object]) -> None:
        data = bytearray(self.blobs.get(name))
        change(data)
        if isinstance(self.blobs, MemoryBlobs):
            self.blobs._data[name] = bytes(data)
        else:
            (self.folder / name).write_bytes(data)


@pytest.fixture(params=["folder", "memory"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(request.param, tmp_path)


def write(blobs: Blobs, name: str, data: bytes = DATA, durable: bool = True) -> Blob:
    """In two pieces, the second first."""
    target = blobs.create(name, len(data), durable)
    half = len(data) // 2
    target.write(memoryview(data)[half:], half)
    target.write(memoryview(data)[:half], 0)
    return target.finish(digest_of(data), len(data))


def read(blobs: Blobs, blob: Blob) -> bytes:
    source = blobs.open(blob)
    try:
        return source.read(0, source.size)
    finally:
        source.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_blob_appears_whole_when_it_is_finished(bench: Bench, durable: bool) -> None:
    blobs = bench.blobs
    target = blobs.create("state/a", len(DATA), durable)
    target.write(memoryview(DATA), 0)
    piece = bytearray(5)
    target.read_into(memoryview(piece), 250)
    assert bytes(piece) == DATA[250:255]
    assert (blobs.names(""), blobs.size("state/a")) == ([], None)
    blob = target.finish(digest_of(DATA), len(DATA))
    assert blob == Blob("state/a", digest_of(DATA), len(DATA))
    assert (blobs.names("state/"), blobs.size("state/a")) == (["state/a"], len(DATA))
    target.abort()
    assert read(blobs, blob) == DATA


def test_what_is_given_up_leaves_nothing_and_the_old_blob_stays(bench: Bench) -> None:
    old = write(bench.blobs, "state/a", b"old")
    target = bench.blobs.create("state/a", 3)
    target.write(memoryview(b"new"), 0)
    target.abort()
    target.abort()
    assert read(bench.blobs, old) == b"old"
    assert bench.blobs.names("") == ["state/a"]


def test_a_name_can_be_given_to_another_blob_while_the_first_is_read(bench: Bench) -> None:
    source = bench.blobs.open(write(bench.blobs, "state/a", b"old"))
    new = write(bench.blobs, "state/a", b"newer")
    assert source.read(0, 9) == b"old"
    source.close()
    assert read(bench.blobs, new) == b"newer"


def test_small_blobs(bench: Bench) -> None:
    blob = bench.blobs.put("inbox/train-1-a/update.json", b"{}")
    assert blob == Blob("inbox/train-1-a/update.json", digest_of(b"{}"), 2)
    assert bench.restart().get(blob.name) == b"{}"
    with pytest.raises(KeyError):
        bench.blobs.get("inbox/none")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, len(DATA)), count=st.integers(0, len(DATA) + 10), frame=st.integers(1, 3000))
def test_ranges(bench: Bench, start: int, count: int, frame: int) -> None:
    blob = write(bench.blobs, "state/a")
    source = bench.blobs.open(blob)
    assert (source.size, source.read(start, count)) == (len(DATA), DATA[start : start + count])
    target = bytearray(count)
    if start + count > len(DATA):
        with pytest.raises(Truncated, match="state/a"):
            source.read_into(memoryview(target), start)
    else:
        source.read_into(memoryview(target), start)
        assert bytes(target) == DATA[start : start + count]
    frames = list(read_frames(source, start, lambda: frame))
    assert b"".join(frames) == DATA[start:]
    assert all(len(piece) == frame for piece in frames[:-1])
    with pytest.raises(OSError, match="Bad file"):  # the frames closed it
        source.read(0, 1)
    source.close()


def test_an_offset_behind_the_end_is_refused_at_once(bench: Bench) -> None:
    source = bench.blobs.open(write(bench.blobs, "state/a"))
    with pytest.raises(BadOffset, match=f"offset {len(DATA) + 1}"):
        read_frames(source, len(DATA) + 1)
    source.close()


DAMAGES: dict[str, Callable[[bytearray], object]] = {
    "flipped": lambda data: data.__setitem__(700, data[700] ^ 4),
    "cut": lambda data: data.pop(),
    "longer": lambda data: data.append(0),
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_bytes_are_held_against_the_digest_once_a_process(bench: Bench, kind: str) -> None:
    blob = write(bench.blobs, "state/a")
    bench.rewrite(blob.name, DAMAGES[kind])
    blobs = bench.restart()
    for _ in range(2):
        with pytest.raises(Damaged, match="state/a is damaged") as caught:
            blobs.open(blob)
    assert caught.value.exit_code == HomeMismatch.exit_code == 4
    bench.rewrite(blob.name, lambda data: data.__init__(DATA))  # restored
    assert read(blobs, blob) == DATA
    bench.rewrite(blob.name, DAMAGES["flipped"])
    blobs.open(blob).close()  # it was seen to be whole
    with pytest.raises(Damaged):
        blobs.check(blob)
    with pytest.raises(Damaged):
        blobs.open(blob)  # and is no longer believed to be


def test_a_missing_blob_is_damaged(bench: Bench) -> None:
    with pytest.raises(Damaged, match="state/none is missing"):
        bench.blobs.open(Blob("state/none", digest_of(b""), 0))


def test_the_digest_asked_for_counts_and_not_the_name(bench: Bench) -> None:
    write(bench.blobs, "state/a", b"one")
    with pytest.raises(Damaged):
        bench.blobs.open(Blob("state/a", digest_of(b"two"), 3))


def test_a_moved_blob_keeps_its_bytes_and_is_still_believed(bench: Bench) -> None:
    upload = write(bench.blobs, "uploads/a/shared.complete")
    older = write(bench.blobs, "inbox/train-1-a/shared", b"older")
    moved = bench.blobs.move(upload, older.name)
    assert moved == Blob("inbox/train-1-a/shared", digest_of(DATA), len(DATA))
    assert bench.blobs.names("") == [moved.name]
    assert read(bench.blobs, moved) == DATA
    with pytest.raises(Damaged, match="missing"):
        bench.blobs.move(upload, "inbox/elsewhere")
    bench.rewrite(moved.name, DAMAGES["flipped"])
    again = bench.blobs.move(bench.restart().move(moved, "uploads/b"), "uploads/c")
    with pytest.raises(Damaged):  # nobody in this process has seen its bytes
        bench.blobs.open(again)


def test_removed_blobs_are_gone_and_readers_go_on(bench: Bench) -> None:
    blobs = [write(bench.blobs, f"inbox/train-1-{name}/update.json", name.encode()) for name in "abc"]
    source = bench.blobs.open(blobs[0])
    bench.blobs.remove([blobs[0].name, "inbox/none/x", blobs[1].name])
    assert bench.blobs.names("inbox/train-1-") == ["inbox/train-1-c/update.json"]
    assert source.read(0, 5) == b"a"
    source.close()
    if bench.kind == "folder":
        assert [path.name for path in (bench.folder / "inbox").iterdir()] == ["train-1-c"]


def test_names_are_by_prefix_and_sorted(bench: Bench) -> None:
    for name in ("state/b.1", "state/a~x.1", "state/b.10", "inbox/b/1"):
        bench.blobs.put(name, b"")
    assert bench.blobs.names("state/") == ["state/a~x.1", "state/b.1", "state/b.10"]
    assert bench.blobs.names("state/b.1") == ["state/b.1", "state/b.10"]
    assert bench.blobs.names("uploads/") == []


def test_growing_goes_on_after_a_restart(bench: Bench) -> None:
    growing = bench.blobs.grow("uploads/a/x", len(DATA))
    growing.append(memoryview(DATA)[:1000])
    growing.append(memoryview(DATA)[1000:1001])
    assert growing.size == bench.blobs.size("uploads/a/x") == 1001
    growing.close()
    growing.close()
    growing = bench.restart().grow("uploads/a/x", len(DATA))
    assert growing.size == 1001
    piece = bytearray(10)
    growing.read_into(memoryview(piece), 991)
    assert bytes(piece) == DATA[991:1001]
    with pytest.raises(Truncated):
        growing.read_into(memoryview(piece), 992)
    growing.append(memoryview(DATA)[1001:])
    blob = growing.seal("uploads/a/x.complete", digest_of(DATA))
    growing.close()
    assert blob == Blob("uploads/a/x.complete", digest_of(DATA), len(DATA))
    assert bench.blobs.names("") == [blob.name]
    assert read(bench.blobs, blob) == DATA


def test_one_at_a_time_grows_and_what_is_too_long_begins_anew(bench: Bench) -> None:
    growing = bench.blobs.grow("uploads/a/x", 10)
    with pytest.raises(UploadBusy, match="x"):
        bench.blobs.grow("uploads/a/x", 10)
    growing.append(memoryview(b"0123456789"))
    growing.close()
    growing = bench.blobs.grow("uploads/a/x", 9)
    assert growing.size == 0
    growing.remove()
    assert bench.blobs.names("") == []
    bench.blobs.grow("uploads/a/x", 9).close()


def test_several_threads_read_and_write(bench: Bench) -> None:
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for number in range(20):
                data = bytes([which]) * (1000 + number)
                blob = write(bench.blobs, f"state/{which}.{number}", data, durable=False)
                assert read(bench.blobs, blob) == data
                bench.blobs.remove([blob.name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bench.blobs.names("") == []


def test_tensors_are_written_to_and_read_from_any_store(bench: Bench) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
    blob = write_tensors(partial(bench.blobs.create, "state/a"), tensors)
    with TensorFile(bench.blobs.open(blob)) as file:
        assert {name: tensor.tolist() for name, tensor in file.items()} == {"n": 3, "w": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}
    assert blob.digest == digest_of(bench.blobs.get("state/a"))


def test_a_local_path_is_an_optional_capability(bench: Bench) -> None:
    blob = write(bench.blobs, "state/a")
    path = bench.blobs.path(blob)
    assert (path is not None) == (bench.kind == "folder")
    assert path is None or path.read_bytes() == DATA


def test_what_a_killed_process_left_unfinished_is_swept(bench: Bench) -> None:
    blob = write(bench.blobs, "state/a")
    left = bench.blobs.create("inbox/train-1-a/shared", 3)
    left.write(memoryview(b"new"), 0)
    bench.restart().sweep()
    assert bench.blobs.names("") == [blob.name]
    if bench.kind == "folder":
        assert [path.name for path in bench.folder.rglob("*") if path.is_file()] == ["a"]
