"""A stranger's home or backup brings no code without the user's consent and nothing else, and no other user reads a home."""

import asyncio
import hashlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common import aio
from attune.common.errors import SettingError
from attune.fedserver import app
from attune.fedserver.cli import cli
from attune.fedserver.consent import code_in
from attune.fedserver.home import ServerHome, StoragePlace
from attune.fedserver.stores import row_digests
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.view.backup import back_up
from tests.homes.make import HERE, unpack

CODE = """
from pathlib import Path
import msgspec
from attune.common.models.registry import build

Path(__file__).with_name("ran").touch()

def model(spec):
    return build(msgspec.structs.replace(spec, name="dnn"), 0)
"""
NAME = "strangers_code:model"
REFUSED = f"--allow-code {NAME}"


def fedserver(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def replaced(home: ServerHome, old: bytes, new: bytes) -> None:
    """Write something else into the plan of a home."""
    with closing(sqlite3.connect(home.path / "state.sqlite")) as db:
        row_digests.keep(db)
        [text] = db.execute("SELECT value FROM meta WHERE key = 'plan'").fetchone()
        text = text.encode() if isinstance(text, str) else bytes(text)
        assert old in text
        db.execute("UPDATE meta SET value = ? WHERE key = 'plan'", (text.replace(old, new),))
        db.commit()


def renamed(home: ServerHome, name: str) -> None:
    """Let the plan of a home name another model."""
    plan = home.snapshot().plan
    assert plan is not None
    replaced(home, f'"name":"{plan.model.name}"'.encode(), f'"name":"{name}"'.encode())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerHome:
    """Return the finished home of a stranger, whose plan names a module that is importable here, as was hoped."""
    (tmp_path / "strangers_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers_code", raising=False)
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "mine"))
    unpack(HERE / "finished.tar.xz", tmp_path / "made")
    place = ServerHome((tmp_path / "made" / "server").rename(tmp_path / "home"))
    renamed(place, NAME)
    assert place.snapshot().plan.model.name == NAME  # type: ignore[union-attr]
    return place


def ran(home: ServerHome) -> bool:
    return (home.path.parent / "ran").exists()


async def listening(home: ServerHome, overrides: dict[str, Any]) -> None:
    """Start a server, and stop it when it listens; raise what it raises before."""
    listens = asyncio.Event()

    def say(line: str) -> None:
        if "listens" in line:
            listens.set()

    options = app.ServerOptions(home.path, "127.0.0.1", 0, False, say, "off")
    ends = [asyncio.ensure_future(app.run(options, overrides)), asyncio.ensure_future(listens.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    for result in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


COMMANDS: dict[str, Callable[[ServerHome], tuple[int, str]]] = {
    "export": lambda home: fedserver("export", "--home", home.path, "--out", home.path.parent / "out"),
    "start": lambda home: fedserver("--home", home.path, "--port", "0", "--exit-when-done", "--dashboard", "off"),
    "migrate": lambda home: fedserver(
        "migrate", "--home", home.path, "--ledger", "postgresql://localhost:1/none", "--blobs", "s3://none/none"
    ),
    "restore": lambda home: fedserver("restore", "--from", home.path.parent / "backup", "--home", home.path.parent / "new"),
    "restore below": lambda home: fedserver(
        "restore", "--from", home.path.parent / "backup", "--home", home.path.parent / "mine" / "server" / "new"
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_no_code_that_a_home_names(home: ServerHome, command: str) -> None:
    list(back_up(home, home.path.parent / "backup"))
    code, said = COMMANDS[command](home)
    assert code != 0 and REFUSED in said, said
    assert not ran(home)
    assert not any((home.path.parent / left).exists() for left in ("out", "new", "mine/consent.json", "mine/server/new"))


@pytest.mark.parametrize("command", ["status", "verify", "audit", "privacy", "statistics", "run list", "plot", "backup"])
def test_views_of_a_home_run_no_code(home: ServerHome, command: str) -> None:
    out = ["--out", home.path.parent / "view"] if command in ("plot", "backup") else []
    fedserver(*command.split(), "--home", home.path, *out)
    assert not ran(home)


def test_a_standby_refuses_before_it_waits(home: ServerHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerHome, "storage_place", lambda _: StoragePlace("postgresql://a", "s3://b"))
    monkeypatch.setattr(ServerHome, "open", lambda place: DiskStorage(place.path))
    with home.locked(), pytest.raises(SettingError, match=REFUSED):
        aio.run(listening(home, {}))
    assert not ran(home)


def test_consent_is_for_one_federation_and_one_name_and_kept_outside_of_the_home(home: ServerHome) -> None:
    export = ("export", "--home", home.path, "--out", home.path.parent / "out")
    assert REFUSED in fedserver(*export, "--allow-code", "another:model")[1]
    assert not ran(home)
    assert fedserver(*export, "--allow-code", NAME)[0] == 0
    assert ran(home)
    assert [path.name for path in (home.path.parent / "mine").glob("*.json")] == ["consent.json"]
    assert fedserver(*export)[0] == 0, "it is kept"
    renamed(home, "strangers_code:another")
    assert "--allow-code strangers_code:another" in fedserver(*export)[1]
    renamed(home, NAME)
    plan = home.snapshot().plan
    assert plan is not None
    replaced(home, plan.federation.encode(), b"0" * len(plan.federation))
    assert REFUSED in fedserver(*export)[1], "another federation"


def test_a_backup_is_restored_with_consent_and_its_home_starts(home: ServerHome) -> None:
    list(back_up(home, home.path.parent / "backup"))
    new = ServerHome(home.path.parent / "new")
    code, said = fedserver("restore", "--from", home.path.parent / "backup", "--home", new.path, "--allow-code", NAME)
    assert code == 0, said
    aio.run(listening(new, {}))


def test_code_that_the_user_names_at_a_start_needs_no_other_consent(home: ServerHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it later, for the same user."""
    new = ServerHome(home.path.parent / "new")
    aio.run(listening(new, {"model": {"name": NAME}}))
    aio.run(listening(new, {}))
    monkeypatch.setenv("ATTUNE_HOME", str(home.path.parent / "another"))
    with pytest.raises(SettingError, match=REFUSED):
        aio.run(listening(new, {}))


def test_an_upgraded_server_goes_on_with_its_default_home_and_takes_no_new_code(home: ServerHome) -> None:
    mine = home.path.parent / "mine"
    mine.mkdir()
    default = ServerHome(Path(shutil.move(home.path, mine / "server")))
    assert fedserver("export", "--out", home.path.parent / "out")[0] == 0
    assert ran(home)
    renamed(default, "strangers_code:another")
    assert "--allow-code strangers_code:another" in fedserver("export", "--out", home.path.parent / "out")[1]


def test_a_default_home_that_named_no_code_brings_none_later(home: ServerHome) -> None:
    mine = home.path.parent / "mine"
    mine.mkdir()
    default = ServerHome(Path(shutil.move(home.path, mine / "server")))
    renamed(default, "dnn")
    aio.run(listening(default, {}))
    renamed(default, NAME)
    assert REFUSED in fedserver("export", "--out", home.path.parent / "out")[1]
    assert not ran(home)


def test_a_simulation_goes_on_with_the_code_that_it_is_given_alone(home: ServerHome) -> None:
    rng, folder = np.random.default_rng(0), home.path.parent / "simulated"
    shards = {name: (rng.random((20, 3)), np.arange(20) % 4) for name in ("a", "b", "c")}
    attune.simulate(shards, "fedavg", "dnn", rounds=1, home=folder, progress=False)
    renamed(ServerHome(folder / "server"), NAME)
    with pytest.raises(SettingError, match=NAME):
        attune.simulate(shards, "fedavg", "dnn", rounds=1, home=folder, progress=False)
    assert not ran(home)


def test_settings_name_models_and_packages() -> None:
    assert code_in({"model": {"name": "dnn"}, "method": {"name": "fedavg", "objective": "sgd"}}) == set()
    assert code_in({"model": {"name": NAME}, "round": {"rounds": 3}}) == {NAME}


Manifest = dict[str, Any]
Spoil = Callable[[Path, Manifest], None]


def entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a backup, and a secret beside it."""
    folder = tmp_path_factory.mktemp("strangers")
    home = ServerHome(folder / "home")
    home.create()
    home.open_authority()

    async def fill() -> None:
        async with home.open() as storage:
            await storage.ledger.note("made", "a test")

    aio.run(fill())
    assert fedserver("backup", "--home", folder / "home", "--out", folder / "backup")[0] == 0
    return folder


def linked(how: Callable[[Path, Path], None]) -> Spoil:
    """Put a link of some kind to a secret in the place of a file."""

    def spoil(backup: Path, manifest: Manifest) -> None:
        secret = backup.parent / "secret"
        secret.write_bytes(b"a secret")
        name = next(iter(manifest["files"]))
        (backup / name).unlink()
        how(backup / name, secret)
        manifest["files"][name] = entry(b"a secret")

    return spoil


def listed(name: str) -> Spoil:
    """Name a file outside of the backup in its manifest."""

    def spoil(backup: Path, manifest: Manifest) -> None:
        (backup.parent / "outside").write_bytes(b"a secret")
        manifest["files"][name.format(backup.parent)] = entry(b"a secret")

    return spoil


def a_pipe(backup: Path, manifest: Manifest) -> None:
    os.mkfifo(backup / "pipe")


def a_pipe_as_manifest(backup: Path, manifest: Manifest) -> None:
    (backup / "MANIFEST.json").unlink()
    os.mkfifo(backup / "MANIFEST.json")
    manifest.clear()


def a_linked_folder(backup: Path, manifest: Manifest) -> None:
    (backup / "more").symlink_to(backup.parent)


def a_deep_manifest(backup: Path, manifest: Manifest) -> None:
    manifest.clear()
    (backup / "MANIFEST.json").write_bytes(b"[" * 100_000)


def database(statement: str) -> Spoil:
    """Change the schema of the database."""

    def spoil(backup: Path, manifest: Manifest) -> None:
        with closing(sqlite3.connect(backup / "state.sqlite")) as db:
            db.executescript(statement)
        manifest["files"]["state.sqlite"] = entry((backup / "state.sqlite").read_bytes())

    return spoil


DEVICES = "CREATE TABLE devices (name TEXT PRIMARY KEY, public_key TEXT NOT NULL {})"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (linked(lambda path, secret: path.symlink_to(secret)), "a symbolic link"),
        (linked(lambda path, secret: path.hardlink_to(secret)), "another name"),
        (a_linked_folder, "a symbolic link"),
        (a_pipe, "not a regular file"),
        (a_pipe_as_manifest, "not a regular file"),
        (a_deep_manifest, "damaged"),
        (listed("../outside"), "outside of the backup"),
        (listed("{}/outside"), "outside of the backup"),
        (listed("ca/../../outside"), "outside of the backup"),
        (database("CREATE TRIGGER evil AFTER UPDATE ON meta BEGIN DELETE FROM certificates; END"), "trigger evil"),
        (database("CREATE TRIGGER evil AFTER INSERT ON meta BEGIN DELETE FROM certificates; END"), "trigger evil"),
        (database("ALTER TABLE devices RENAME TO d; CREATE VIEW devices AS SELECT * FROM d"), "table d "),
        (database("CREATE INDEX evil ON devices (hex(zeroblob(name)))"), "index evil"),
        (database("CREATE TABLE evil (x)"), "table evil"),
        (database("CREATE VIRTUAL TABLE evil USING fts5(x)"), "table evil"),
        (database("ALTER TABLE devices ADD COLUMN evil AS (length(name))"), "table devices"),
        (database("ALTER TABLE devices ADD COLUMN evil TEXT"), "table devices"),
        (database("DROP TABLE devices; " + DEVICES.format(", CHECK (length(name) < 2)")), "table devices"),
        (database("PRAGMA user_version = 1; CREATE TRIGGER evil AFTER UPDATE ON tokens BEGIN SELECT 1; END"), "trigger"),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_backup_brings_nothing_but_its_own_files_and_tables(good: Path, tmp_path: Path, spoil: Spoil, message: str) -> None:
    shutil.copytree(good / "backup", tmp_path / "backup")
    manifest = msgspec.json.decode((good / "backup" / "MANIFEST.json").read_bytes())
    spoil(tmp_path / "backup", manifest)
    if manifest:
        (tmp_path / "backup" / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest))
    code, said = fedserver("restore", "--from", tmp_path / "backup", "--home", tmp_path / "new")
    assert code != 0 and message in said, said
    assert not (tmp_path / "new").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name not in ("secret", "outside")) == ["backup"]


def test_a_backup_names_no_log_that_is_read(good: Path, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_bytes(b"a secret\n")
    shutil.copytree(good / "backup", tmp_path / "backup")
    manifest = msgspec.json.decode((good / "backup" / "MANIFEST.json").read_bytes())
    (tmp_path / "backup" / "MANIFEST.json").write_bytes(msgspec.json.encode(manifest | {"home": str(tmp_path)}))
    code, said = fedserver("restore", "--from", tmp_path / "backup", "--home", tmp_path / "new")
    assert code == 0 and "left out" not in said and f"--audit-log {tmp_path / 'audit.jsonl'}" in said


def test_verify_names_a_trigger_in_a_home(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "home", tmp_path / "home")
    with closing(sqlite3.connect(tmp_path / "home" / "state.sqlite")) as db:
        db.execute("CREATE TRIGGER evil AFTER UPDATE ON meta BEGIN DELETE FROM certificates; END")
        db.commit()
    code, said = fedserver("verify", "--home", tmp_path / "home")
    assert code != 0 and "trigger evil" in said


def test_folders_that_others_could_read_are_closed_to_them(tmp_path: Path) -> None:
    """Use a home that was made by `mkdir`, or restored from a backup with other modes."""
    home = ServerHome(tmp_path / "home")
    for folder in (home.path, *(home.path / name for name in ("ca", "state", "inbox", "uploads", "operator"))):
        folder.mkdir(mode=0o755, parents=True)
        folder.chmod(0o755)
    home.create()
    folders = [home.path, *(path for path in home.path.rglob("*") if path.is_dir())]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}
