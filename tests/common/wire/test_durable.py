"""State after a power cut: files and folders are whole or absent. Bytes and names are synced in the right order."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from attune.common import durable
from attune.common.config import TrainSettings
from attune.common.durable import PUBLIC, committed_folder, replaced, sweep, write_file
from attune.common.errors import DiskFull
from attune.common.plan import ModelSpec
from attune.common.wire.files import TensorWriter, manifest_of, write_tensors
from attune.fedclient.messages import OrderResult
from attune.fedclient.model.artifact import save
from attune.fedclient.model.model_info import ModelInfo
from attune.fedclient.work.state import FolderOrders
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import Report
from attune.fedserver.stores.folder import FolderBlobs, FolderSpool
from attune.fedserver.stores.inbox import Inbox

ROOT = Path(__file__).parents[3]
W = {"w": torch.ones(3)}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return ("sync" or "rename", path) of each system call that counts, in order; random parts of names are *."""
    seen: list[tuple[str, str]] = []
    real = {"fsync": os.fsync, "rename": Path.rename, "replace": Path.replace}

    def shown(path: Path | str) -> str:
        path = Path(path)
        beside = path.name.startswith(".") and path.name.endswith(".tmp")
        return str(path.with_name(f"{path.name[: -len('0123456789ab.tmp')]}*") if beside else path)

    def fsync(fd: int) -> None:
        seen.append(("sync", shown(Path(f"/proc/self/fd/{fd}").readlink())))
        real["fsync"](fd)

    def moved(name: str) -> Callable[[Path, Path], Path]:
        def move(self: Path, target: Path) -> Path:
            seen.append(("rename", shown(target)))
            return real[name](self, target)

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", moved("rename"))
    monkeypatch.setattr(Path, "replace", moved("replace"))
    return seen


def result(order_id: str) -> OrderResult:
    return OrderResult(order_id=order_id, round=1, trained=True, samples=1, sequence=1)


def whole(path: Path) -> list[tuple[str, str]]:
    """Return the one right order for a file."""
    return [("sync", f"{path.parent}/.{path.name}.*"), ("rename", str(path)), ("sync", str(path.parent))]


def test_a_file_is_synced_then_named_then_its_name_is_synced(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    path = tmp_path / "file"
    write_file(path, b"secret")
    assert log == whole(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)
    log.clear()
    write_tensors(path, W, durable=True)
    assert log == whole(path)
    log.clear()
    write_tensors(path, W)
    assert log == [("rename", str(path))]
    log.clear()
    with TensorWriter(path, manifest_of(W), durable=True) as writer:
        writer.put("w", W["w"])
    assert log == [("sync", str(path)), ("sync", str(tmp_path))]


def test_no_file_is_ever_more_open_than_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(os, "fsync", lambda fd: modes.append(os.fstat(fd).st_mode & 0o777))
    old = os.umask(0)
    try:
        write_file(tmp_path / "new" / "key", b"")
        write_file(tmp_path / "new" / "certificate", b"", PUBLIC)
    finally:
        os.umask(old)
    assert modes == [0o600, 0o700, 0o644, 0o700]  # each file, then the folder that was made for it


def test_a_devices_order_is_committed_by_one_rename(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    folder = tmp_path / "orders" / ".filling-train-1-kiel"
    FolderOrders(tmp_path / "orders").commit(result("train-1-kiel"), {"v": torch.zeros(2)}, {"optimiser": W}, {"shared": W})
    files = ["shared.safetensors", "state.safetensors", "optimiser.safetensors", "update.json"]
    final = folder.with_name("train-1-kiel")
    assert log == [
        *[("rename", str(folder / name)) for name in files],
        *[("sync", str(folder / name)) for name in sorted(files)],  # each once, and all before the folder gets its name
        ("sync", str(folder)),
        ("rename", str(final)),
        ("sync", str(final.parent)),
    ]
    assert {path.name for path in final.iterdir()} == set(files)


def test_an_update_enters_the_inbox_by_its_entry(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    blobs, order = FolderBlobs(tmp_path), OrderId("train", 1, "a")
    upload = blobs.put("uploads/a/shared", b"bytes")
    log.clear()
    Inbox(blobs).accept(order, Report(round=1, work="train", client="a"), {"shared": upload})
    folder = tmp_path / "inbox" / str(order)
    assert log == [
        ("sync", str(tmp_path / "uploads" / "a" / "shared")),  # a finished upload need not be durable
        ("sync", str(folder.parent)),  # the names of the new folders
        ("sync", str(tmp_path)),
        ("rename", str(folder / "shared.safetensors")),
        *whole(folder / "update.json"),  # this makes it count, and the names beside it durable
    ]


def test_a_blob_takes_its_name_when_it_is_durable(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    (tmp_path / "state").mkdir()
    blobs = FolderBlobs(tmp_path)
    write_tensors(partial(blobs.create, "state/a"), W)
    assert log == whole(tmp_path / "state" / "a")
    log.clear()
    write_tensors(partial(blobs.create, "state/b", durable=False), W)
    assert log == [("rename", str(tmp_path / "state" / "b"))]
    growing = FolderSpool(blobs).grow("a/shared", "sha256:0", 3)
    growing.append(memoryview(b"abc"))
    log.clear()
    sealed = growing.seal()
    whole_upload = tmp_path / "uploads" / "a" / "shared.sha256-0.complete"
    assert log == [("rename", str(whole_upload))]
    blobs.sync(sealed)
    assert log[1:] == [("sync", str(whole_upload))]


def test_an_update_enters_an_inbox_on_a_file_system_without_links(tmp_path, log: list[tuple[str, str]], monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    blobs = FolderBlobs(tmp_path)
    upload = blobs.put("uploads/a/shared", b"bytes")
    log.clear()
    kept = blobs.keep(upload, "inbox/shared")
    assert ("sync", str(tmp_path / "inbox" / ".shared.*")) in log, "a copy is not durable because its source is"
    blobs.remove([upload.name])
    assert blobs.get(kept.name) == b"bytes"


def test_a_finished_model_takes_the_place_of_an_older_one(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    info = ModelInfo("kiel", "f", "fedavg", {}, ModelSpec("mlr", "tabular", (2,), 2), [0, 1], TrainSettings())
    for _ in range(2):
        log.clear()
        save(tmp_path / "model", info, {"personalized": W})
    folder, final = tmp_path / ".filling-model", tmp_path / "model"
    assert log == [
        ("rename", str(folder / "model.safetensors")),
        ("rename", str(folder / "model.json")),
        ("rename", str(tmp_path / "model.old")),
        ("sync", str(folder / "model.json")),
        ("sync", str(folder / "model.safetensors")),
        ("sync", str(folder)),
        ("rename", str(final)),
        ("sync", str(tmp_path)),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_wherever_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Fill the disk at the sync, where a quota is often noticed. The old file stays, and no new one is left."""
    write_file(tmp_path / "file", b"old")
    blobs = FolderBlobs(tmp_path)
    inbox, upload = Inbox(blobs), blobs.put("uploads/a/shared", b"bytes")
    (tmp_path / "inbox").mkdir()

    def full(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    writes: list[Callable[[], object]] = [
        lambda: write_file(tmp_path / "file", b"new"),
        lambda: write_tensors(tmp_path / "file", W, durable=True),
        lambda: inbox.accept(OrderId("train", 1, "a"), Report(round=1, work="train", client="a"), {"shared": upload}),
        lambda: FolderOrders(tmp_path / "orders").commit(result("x"), W, {}, {}),
    ]
    for write in writes:
        with pytest.raises(DiskFull, match="free some space"):
            write()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "inbox", "orders", "uploads"]
    assert [*(tmp_path / "orders").iterdir()] == []
    assert blobs.names("inbox/") == [], "nothing was accepted"
    assert blobs.get("uploads/a/shared") == b"bytes", "and what was uploaded need not be sent again"


def test_other_failures_pass_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(IsADirectoryError), replaced(tmp_path / "taken") as beside:
        beside.touch()
    with pytest.raises(OSError, match="not empty"), committed_folder(tmp_path / "taken"):
        pass
    with pytest.raises(ZeroDivisionError), committed_folder(tmp_path / "new") as filling:
        (filling / "file").touch()
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "file"]


def test_what_a_kill_left_is_not_taken_over(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f".filling-{name}").mkdir()
        (tmp_path / f".filling-{name}" / "crumb").touch()
    with committed_folder(tmp_path / "one") as filling:
        write_file(filling / "file", b"")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["file"]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_there_is_one_place_that_syncs() -> None:
    found = [path for side in ("common", "fedclient", "fedserver") for path in (ROOT / side).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in found if "fsync(" in path.read_text()] == ["common/durable.py"]


def test_a_folder_that_is_removed_is_never_there_by_half(tmp_path, monkeypatch):
    folder = tmp_path / "order"
    folder.mkdir()
    (folder / "update.json").write_bytes(b"{}")

    def killed(path, ignore_errors=False):
        if Path(path).exists():
            (Path(path) / "update.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            durable.discard_folder(folder)
    assert not folder.exists()
    durable.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_of_blobs_are_not_looked_for_behind_links(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "one").write_bytes(b"1")
    (tmp_path / "state" / "here").symlink_to(tmp_path / "state", target_is_directory=True)
    assert FolderBlobs(tmp_path).names("state/") == ["state/one"]
