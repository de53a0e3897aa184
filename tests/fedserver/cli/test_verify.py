"""`fedserver verify`: a line for each damaged file of a home. A start removes leftovers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attune.common import aio
from attune.common.errors import AttuneError, DiskFull, LedgerBusy
from attune.common.exchange.messages import UploadTarget
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of
from attune.common.wire.files import write_tensors
from attune.fedserver.cli import cli
from attune.fedserver.core.messages import OrderId, Record
from attune.fedserver.core.records import Report
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.recovery import take_up
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.uploads import Uploads
from attune.fedserver.view import backup
from tests.fedserver.bench import plan


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a home after a round, with an update of the next one in the inbox, and another one uploaded."""
    ServerHome(tmp_path).create()
    home = ServerHome(tmp_path)
    home.open_authority()
    storage = home.open()
    ledger, blobs = storage.ledger, storage.blobs
    inbox, uploads = Inbox(blobs), Uploads(storage)
    engine, _ = take_up(plan("fedavg", "mlr"), [], blobs, 0)
    first = engine.staged_slots()
    engine.settle()

    def accept(number: int) -> None:
        order = OrderId("train", number, "kiel")
        tensors = {name: torch.full(spec.shape, 0.5) for name, spec in engine.manifests["shared"].items()}
        part = write_tensors(partial(blobs.create, "uploads/kiel/shared"), tensors)
        inbox.accept(order, Report(round=number, work="train", client="kiel", samples=3), {"shared": part})

    accept(1)
    made = engine.aggregate(inbox.entries("train", 1)).slots
    aio.run(ledger.commit_round(Record(round=1), [*first, *made], [], {}, plan("fedavg", "mlr")))
    engine.settle()
    accept(2)
    target = UploadTarget("train-2-bonn", "shared", digest_of(b"foo"), 3)
    sink = uploads.sink("bonn", target, 100)
    uploads.write("bonn", "shared", sink, [b"foo"])
    uploads.complete("bonn", "shared", sink)
    aio.run(ledger.close())
    return tmp_path


def verify(home: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli, ["verify", "--home", str(home)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output.splitlines()


@pytest.mark.parametrize("error", [LedgerBusy("s3://bucket cannot be used now", "blobs"), DiskFull("the disk is full")])
def test_a_store_that_cannot_be_used_is_no_damage(home: Path, monkeypatch: pytest.MonkeyPatch, error: AttuneError) -> None:
    """Before, a store that answered 500 to all was damage in need of a backup, with exit code 4."""

    def fails(blobs: FolderBlobs, blob: Blob) -> None:
        raise error

    monkeypatch.setattr(FolderBlobs, "check", fails)
    result = CliRunner().invoke(cli, ["verify", "--home", str(home)])
    assert result.exception is error and result.output == ""


def test_a_blob_that_a_round_replaces_meanwhile_is_no_damage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, check = list[str](), FolderBlobs.check

    def gone_once(blobs: FolderBlobs, blob: Blob) -> None:
        looks.append(blob.name)
        if looks.count(blob.name) == 1:
            raise Damaged(f"{blob.name} is missing: restore it from a backup", blob.name)
        check(blobs, blob)

    monkeypatch.setattr(backup, "SETTLED_S", 0.0)
    monkeypatch.setattr(FolderBlobs, "check", gone_once)
    assert verify(home) == (0, [f"{home} is whole"])


def test_a_whole_home_is_whole_and_left_as_it_is(home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and "sqlite" not in path.name}
    assert verify(home) == (0, [f"{home} is whole"])
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and "sqlite" not in path.name} == before


@pytest.mark.parametrize(
    "pattern",
    [
        "state/shared.value.1.safetensors",
        "state/shared.value.0.safetensors",  # kept to rebuild the other one
        "inbox/train-1-kiel/shared.safetensors",
        "inbox/train-2-kiel/shared.safetensors",
        "uploads/bonn/*.complete",
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damaged_file_has_its_line(home: Path, pattern: str, damage: str) -> None:
    [path] = home.glob(pattern)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    changes: dict[str, Callable[[], object]] = {
        "flip": lambda: path.write_bytes(data),
        "cut": lambda: path.write_bytes(data[:-1]),
        "remove": path.unlink,
    }
    changes[damage]()
    if damage == "remove" and pattern.startswith("uploads"):
        assert verify(home)[0] == 0, "an upload that is not there is none"
        return
    code, [line] = verify(home)
    assert code == 4
    assert str(path.relative_to(home)) in line
    assert "missing" in line if damage == "remove" else f"{path} is damaged" in line


@pytest.mark.parametrize(
    "name", ["state.sqlite", "ca/ca-key.pem", "server.json", "state/recipe.1.json", "inbox/train-1-kiel/update.json"]
)
def test_other_files_that_are_damaged_are_named(home: Path, name: str) -> None:
    path = home / name
    path.write_bytes(b"\0" * 4096 if name.endswith("sqlite") else b"{")
    code, lines = verify(home)
    assert code == 4
    assert sum((path.name in line and str(home) in line) or name in line for line in lines) == len(lines) == 1


def test_several_damages_have_several_lines(home: Path) -> None:
    for name in ("state/shared.value.1.safetensors", "inbox/train-2-kiel/shared.safetensors"):
        (home / name).write_bytes(b"")
    assert len(verify(home)[1]) == 2


def test_a_start_sweeps_up_unfinished_files(tmp_path: Path) -> None:
    home = ServerHome(tmp_path)
    home.create()
    home.open_authority()
    left = [tmp_path / name for name in (".server.json.0123456789ab.tmp", "ca/.ca-key.pem.ba9876543210.tmp")]
    for path in left:
        path.touch()
    others = tmp_path / "ca" / ".notes.tmp"  # a foreign file
    others.touch()
    home.create()
    assert [path.exists() for path in (*left, others)] == [False, False, True]
