"""Blobs in S3: the cache and its bound, what belongs to whom, and stores that are lost."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attune.common import aio
from attune.common.errors import HomeMismatch, LedgerBusy, SettingError
from attune.common.wire.digest import digest_of
from tests import engines

pytest.importorskip("psycopg")
pytest.importorskip("obstore")

from attune.features.remote import s3, s3_objects
from attune.features.remote.postgres import PostgresDatabase
from attune.features.remote.storage import RemoteStorage

pytestmark = pytest.mark.engines


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[RemoteStorage]:
    made = engines.remote_storage(tmp_path)
    made.create()
    yield made
    aio.run(made.close())


def objects(storage: RemoteStorage) -> set[str]:
    return set(storage.blobs._objects.keys(s3.OBJECTS))


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "http://bucket/x", "s3://key:secret@bucket/x", "s3://bucket/x?secret=1"])
def test_a_url_with_a_secret_or_without_a_bucket_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingError, match="s3://BUCKET/PREFIX") as caught:
        s3.check_url(url)
    assert "secret" not in str(caught.value)


def test_a_prefix_belongs_to_one_federation(storage: RemoteStorage, tmp_path: Path) -> None:
    storage.blobs.put("state/a", b"mine")
    (tmp_path / "other").mkdir()
    other = RemoteStorage(tmp_path / "other", engines.postgres().new(), storage._blobs_url)
    with pytest.raises(HomeMismatch, match="holds the blobs of another federation"):
        other.create()
    assert storage.blobs.get("state/a") == b"mine"
    aio.run(other.close())
    engines.again(storage).create()


def test_objects_without_a_name_go_at_the_next_start(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die between the object and its name, and let a removal in S3 fail: both leave an object that nobody needs."""
    storage.blobs.put("state/kept", b"kept")

    def die(*arguments: object) -> None:
        raise LedgerBusy("lost")

    with monkeypatch.context() as patch:
        patch.setattr(storage.blobs, "_give", die)
        with pytest.raises(LedgerBusy):
            storage.blobs.put("state/lost", b"lost")
    storage.blobs.put("state/old", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(storage.blobs._objects, "remove", die)
        storage.blobs.remove(["state/old"])
    assert len(objects(storage)) == 3
    engines.again(storage).blobs.sweep()
    assert len(objects(storage)) == 1
    assert storage.blobs.names("state/") == ["state/kept"]


def test_copies_in_the_cache_stay_within_a_bound(storage: RemoteStorage, tmp_path: Path) -> None:
    storage.bound_cache(2500)
    blobs = [storage.blobs.put(f"state/{number}", bytes([number]) * 1000) for number in range(5)]
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 2500
    for blob in blobs:
        opened = storage.blobs.open(blob)
        assert digest_of(opened.read(0, 1000)) == blob.digest
        opened.close()
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 2500


def test_a_start_with_a_smaller_bound_removes_the_least_recently_used_copies(storage: RemoteStorage, tmp_path: Path) -> None:
    for number in range(4):
        storage.blobs.put(f"state/{number}", bytes([number]) * 1000)
    copies = sorted((tmp_path / "cache").iterdir(), key=lambda path: path.read_bytes())
    for age, number in enumerate((2, 0, 3, 1)):  # the newest first
        os.utime(copies[number], (time.time() - age, time.time() - age))
    later = engines.again(storage)
    later.bound_cache(2500)
    assert sorted((tmp_path / "cache").iterdir()) == sorted([copies[2], copies[0]])
    assert later.blobs.get("state/1") == bytes([1]) * 1000


def test_an_authority_without_a_database_begins_only_where_no_federation_was(tmp_path: Path) -> None:
    """A machine may get its authority before the first start, as a Kubernetes secret. A lost database is refused."""
    certificate = tmp_path / "ca.pem"
    certificate.touch()
    storage = engines.remote_storage(tmp_path)
    storage.check(certificate)
    storage.create()
    storage.check(certificate)
    emptied = type(storage)(tmp_path, engines.postgres().new(), storage._blobs_url)
    with pytest.raises(HomeMismatch, match=r"of a federation, but the database .* is empty"):
        emptied.check(certificate)
    for one in (storage, emptied):
        aio.run(one.close())


def test_a_damaged_copy_is_fetched_again(storage: RemoteStorage, tmp_path: Path) -> None:
    blob = storage.blobs.put("state/a", b"content")
    [copy] = (tmp_path / "cache").iterdir()
    copy.write_bytes(b"contemt")
    opened = engines.again(storage).blobs.open(blob)
    assert opened.read(0, 7) == b"content"
    opened.close()


def test_a_large_blob_goes_up_in_parts(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(s3_objects, "PART_BYTES", 5 << 20)
    data = bytes(range(256)) * (13 << 12)  # 13 MiB
    blob = storage.blobs.put("state/large", data)
    [copy] = (tmp_path / "cache").iterdir()
    copy.unlink()
    storage.blobs.check(blob)


def test_a_store_that_cannot_be_reached_is_an_error_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = engines.remote_storage(tmp_path)
    storage.create()
    blob = storage.blobs.put("state/a", b"content")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{engines.free_port()}")
    lost = engines.again(storage).blobs
    began = time.monotonic()
    with pytest.raises(LedgerBusy, match=r"s3://attune/.* cannot be used now"):
        lost.put("state/b", b"other")
    assert time.monotonic() - began < 30
    assert lost.names("state/") == ["state/a"], "what is not in S3 has no name"
    lost.open(blob).close()  # from the cache
    monkeypatch.undo()
    aio.run(storage.close())


def test_blobs_that_cannot_be_removed_now_are_removed_later(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage.blobs.put("state/a", b"a")
    with monkeypatch.context() as patch:

        def lost(self: PostgresDatabase) -> object:
            raise LedgerBusy("the database is lost")

        patch.setattr(PostgresDatabase, "transaction", lost)
        storage.blobs.remove(["state/a"])
    assert "removed later" in caplog.text
    assert storage.blobs.names("state/") == []
    assert objects(storage) == set()
