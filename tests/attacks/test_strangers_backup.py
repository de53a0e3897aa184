"""A stranger's backup: `fedserver restore` takes regular files below its folder, and a database of the schema, nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from attune.common import aio
from attune.fedserver.cli import cli
from attune.fedserver.home import ServerHome

Manifest = dict[str, Any]
Spoil = Callable[[Path, Manifest], None]


def fedserver(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    return done.exit_code, f"{done.output}{done.exception or ''}"


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
