"""Requirements of every store of blobs and every spool, in a folder and in memory."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common import aio
from attune.common.errors import HomeMismatch, UploadBusy
from attune.common.wire.blobs import Blob, read_frames
from attune.common.wire.digest import digest_of
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.malformed import BadOffset, Truncated
from attune.fedserver.ports.blobs import Blobs, Damaged, Spool
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.disk import DiskStorage
from attune.simulation.memory import MemoryStorage
from tests import engines

DATA = bytes(range(256)) * 20
DIGEST = digest_of(DATA)


class Bench:
    """Storage. `restart` makes a new one over the same bytes, as a new process would; `rewrite` damages bytes."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.storage: Storage
        match kind:
            case "folder":
                self.storage = DiskStorage(folder)
            case "memory":
                self.storage = MemoryStorage()
            case _:
                self.storage = engines.remote_storage(folder)

    @property
    def blobs(self) -> Blobs:
        return self.storage.blobs

    @property
    def spool(self) -> Spool:
        return self.storage.spool

    def restart(self) -> Storage:
        if isinstance(self.storage, MemoryStorage):
            self.storage.blobs._known.clear()  # facts that a process knows besides its bytes
            self.storage.spool._open.clear()
        elif self.kind == "folder":
            self.storage = DiskStorage(self.folder)
        else:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)  # as on another machine
            self.storage = engines.again(self.storage)
        return self.storage

    def rewrite(self, name: str, change: Callable[[bytearray], object]) -> None:
        if self.kind == "s3" and name.startswith(("state/", "inbox/")):
            engines.rewrite(self.blobs, name, change)
            return
        data = bytearray(self.blobs.get(name))
        change(data)
        if isinstance(self.storage, MemoryStorage):
            self.storage.blobs._content[self.storage.blobs._digests[name]] = bytes(data)
        else:
            (self.folder / name).write_bytes(data)


@pytest.fixture(params=["folder", "memory", pytest.param("s3", marks=pytest.mark.engines)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path)
    yield made
    aio.run(made.storage.close())


def write(blobs: Blobs, name: str, data: bytes = DATA, durable: bool = True) -> Blob:
    """Write data in two pieces, the second first."""
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
    assert blobs.names("") == []
    blob = target.finish(digest_of(DATA), len(DATA))
    assert blob == Blob("state/a", digest_of(DATA), len(DATA))
    assert blobs.names("state/") == ["state/a"]
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
    assert bench.restart().blobs.get(blob.name) == b"{}"
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
    with pytest.raises(OSError, match="Bad file"):  # the end of the frames has closed it
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
    blobs = bench.restart().blobs
    for _ in range(2):
        with pytest.raises(Damaged, match="state/a is damaged") as caught:
            blobs.open(blob)
    assert caught.value.exit_code == HomeMismatch.exit_code == 4
    bench.rewrite(blob.name, lambda data: data.__init__(DATA))  # the bytes are restored
    assert read(blobs, blob) == DATA
    bench.rewrite(blob.name, DAMAGES["flipped"])
    blobs.open(blob).close()  # it is verified
    with pytest.raises(Damaged):
        blobs.check(blob)
    with pytest.raises(Damaged):
        blobs.open(blob)  # and has to be verified again


def test_a_missing_blob_is_damaged(bench: Bench) -> None:
    with pytest.raises(Damaged, match="state/none is missing"):
        bench.blobs.open(Blob("state/none", digest_of(b""), 0))


def test_the_digest_asked_for_counts_and_not_the_name(bench: Bench) -> None:
    write(bench.blobs, "state/a", b"one")
    with pytest.raises(Damaged):
        bench.blobs.open(Blob("state/a", digest_of(b"two"), 3))


def test_content_is_kept_by_a_second_name_and_goes_with_the_last(bench: Bench) -> None:
    upload = write(bench.blobs, "uploads/a/shared.complete", durable=False)
    older = write(bench.blobs, "inbox/train-1-a/shared", b"older")
    kept = bench.blobs.keep(upload, older.name)
    assert kept == Blob("inbox/train-1-a/shared", digest_of(DATA), len(DATA))
    assert bench.blobs.keep(upload, older.name) == kept, "what is there already may be put again"
    assert bench.blobs.names("") == [kept.name, upload.name]
    bench.blobs.remove([upload.name])
    assert read(bench.blobs, kept) == DATA
    with pytest.raises(Damaged, match="missing"):
        bench.blobs.keep(upload, "inbox/elsewhere")
    bench.blobs.remove([kept.name])
    assert bench.blobs.names("") == []
    with pytest.raises(Damaged, match="missing"):
        bench.blobs.open(kept)


def test_keeping_content_by_another_name_makes_nobody_believe_in_it(bench: Bench) -> None:
    blob = write(bench.blobs, "uploads/a")
    bench.rewrite(blob.name, DAMAGES["flipped"])
    bench.restart()
    with pytest.raises(Damaged):  # this process has not verified its bytes; S3 does it before it takes them
        bench.blobs.open(bench.blobs.keep(blob, "uploads/b"))


def test_equal_content_under_several_names_is_removed_one_by_one(bench: Bench) -> None:
    blobs = [write(bench.blobs, f"state/{name}") for name in "abc"]
    write(bench.blobs, "state/a", b"another")
    bench.blobs.remove(["state/b"])
    assert bench.blobs.names("state/") == ["state/a", "state/c"]
    assert read(bench.blobs, blobs[2]) == DATA


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


def test_an_upload_goes_on_after_a_restart_and_is_sealed_whole(bench: Bench) -> None:
    growing = bench.spool.grow("a/x", DIGEST, len(DATA))
    growing.append(memoryview(DATA)[:1000])
    growing.append(memoryview(DATA)[1000:1001])
    assert growing.size == bench.spool.offset("a/x", DIGEST) == 1001
    growing.close()
    growing.close()
    growing = bench.restart().spool.grow("a/x", DIGEST, len(DATA))
    assert growing.size == 1001
    piece = bytearray(10)
    growing.read_into(memoryview(piece), 991)
    assert bytes(piece) == DATA[991:1001]
    with pytest.raises(Truncated):
        growing.read_into(memoryview(piece), 992)
    assert (bench.spool.sealed("a/x", DIGEST), bench.spool.all_sealed()) == (None, [])
    growing.append(memoryview(DATA)[1001:])
    blob = growing.seal()
    growing.close()
    assert (blob.digest, blob.size) == (DIGEST, len(DATA))
    assert bench.restart().spool.sealed("a/x", DIGEST) == blob
    assert (bench.spool.all_sealed(), bench.spool.offset("a/x", DIGEST)) == ([blob], len(DATA))
    assert read(bench.blobs, blob) == DATA


def test_a_sealed_upload_is_a_blob_that_can_be_kept_and_removed(bench: Bench) -> None:
    kept = bench.blobs.keep(sealed(bench), "inbox/train-1-a/shared")
    bench.blobs.remove([blob.name for blob in bench.spool.all_sealed()])
    assert (bench.spool.sealed("a/x", DIGEST), bench.spool.offset("a/x", DIGEST)) == (None, 0)
    assert read(bench.restart().blobs, kept) == DATA


def sealed(bench: Bench, data: bytes = DATA) -> Blob:
    growing = bench.spool.grow("a/x", digest_of(data), len(data))
    growing.append(memoryview(data))
    return growing.seal()


def test_a_sealed_upload_can_be_opened_again_at_its_end(bench: Bench) -> None:
    blob = sealed(bench)
    growing = bench.restart().spool.grow("a/x", DIGEST, len(DATA))
    assert growing.size == len(DATA)
    growing.close()
    assert bench.spool.sealed("a/x", DIGEST) == blob
    growing = bench.spool.grow("a/x", DIGEST, len(DATA))
    assert growing.seal() == blob
    growing = bench.spool.grow("a/x", DIGEST, len(DATA))
    growing.remove()
    assert (bench.spool.sealed("a/x", DIGEST), bench.blobs.names("")) == (None, [])


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_another_size_of_a_sealed_upload_begins_anew_and_harms_nothing_that_was_kept(bench: Bench, size: int) -> None:
    """Let a device lie about the size of a finished upload, whose update is in the inbox as the same file."""
    kept = bench.blobs.keep(sealed(bench), "inbox/train-1-a/shared")
    growing = bench.spool.grow("a/x", DIGEST, size)
    assert growing.size == 0
    growing.append(memoryview(b"no"))
    growing.close()
    assert bench.spool.sealed("a/x", DIGEST) is None
    bench.blobs.check(kept)


def test_one_at_a_time_grows_and_what_is_too_long_begins_anew(bench: Bench) -> None:
    growing = bench.spool.grow("a/x", DIGEST, 10)
    with pytest.raises(UploadBusy, match="x"):
        bench.spool.grow("a/x", DIGEST, 10)
    growing.append(memoryview(b"0123456789"))
    growing.close()
    growing = bench.spool.grow("a/x", DIGEST, 9)
    assert growing.size == 0
    growing.remove()
    assert bench.spool.offset("a/x", DIGEST) == 0
    bench.spool.grow("a/x", DIGEST, 9).close()


def test_of_one_sender_only_the_upload_with_this_digest_stays(bench: Bench) -> None:
    kept, others = sealed(bench), [b"1", b"2"]
    sealed(bench, others[0])
    for sender, data in [("a/x", others[1]), ("a/xy", others[1]), ("b/x", others[1])]:
        growing = bench.spool.grow(sender, digest_of(data), 1)
        growing.append(memoryview(data))
        growing.close()
    bench.spool.keep_only("a/x", DIGEST)
    assert bench.spool.all_sealed() == [kept]
    left = {sender: bench.spool.offset(sender, digest_of(others[1])) for sender in ("a/x", "a/xy", "b/x")}
    assert left == {"a/x": 0, "a/xy": 1, "b/x": 1}


def test_several_threads_read_and_write(bench: Bench) -> None:
    def work(which: int) -> None:
        for number in range(20):
            data = bytes([which]) * (1000 + number)
            blob = write(bench.blobs, f"state/{which}.{number}", data, durable=False)
            assert read(bench.blobs, blob) == data
            bench.blobs.remove([blob.name])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert bench.blobs.names("") == []


def test_tensors_are_written_to_and_read_from_any_store(bench: Bench) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
    blob = write_tensors(partial(bench.blobs.create, "state/a"), tensors)
    with TensorFile(bench.blobs.open(blob)) as file:
        assert {name: tensor.tolist() for name, tensor in file.items()} == {"n": 3, "w": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}
    assert blob.digest == digest_of(bench.blobs.get("state/a"))


def test_what_a_killed_process_left_unfinished_is_swept(bench: Bench) -> None:
    blob = write(bench.blobs, "state/a")
    left = bench.blobs.create("inbox/train-1-a/shared", 3)
    left.write(memoryview(b"new"), 0)
    bench.restart().blobs.sweep()
    assert bench.blobs.names("") == [blob.name]
    if bench.kind == "folder":
        assert [path.name for path in bench.folder.rglob("*") if path.is_file()] == ["a"]
