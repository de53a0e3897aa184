"""The server's home on disk: its layout, its lock, and how a new one is made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import msgspec

from attune.common.durable import write_file
from attune.common.errors import HomeBusy, HomeMismatch
from attune.fedserver.identity.authority import Authority


class Address(msgspec.Struct):
    """server.json: where the running (or last) server listens, and its process."""

    host: str
    port: int
    pid: int


@dataclass(frozen=True)
class Home:
    """Paths below one folder. Only `create` writes."""

    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca"

    @property
    def operator(self) -> Path:
        return self.path / "operator"

    @property
    def database(self) -> Path:
        return self.path / "state.sqlite"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def serve(self) -> Path:
        return self.path / "serve"

    @property
    def inbox(self) -> Path:
        return self.path / "inbox"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    @property
    def local_token(self) -> Path:
        return self.path / "local-token"

    def exists(self) -> bool:
        return self.database.exists()

    def require(self) -> None:
        """Errors: HomeMismatch if no server has ever used this folder."""
        if not self.exists():
            raise HomeMismatch(f"{self.path} holds no federation: start one there with `fedserver --home {self.path}`")

    def create(self) -> Authority:
        """A complete home, made or completed; the authority it belongs to. Folders of a single process are emptied."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = not (self.authority / "ca.pem").exists()
        if fresh and self.database.exists():
            raise HomeMismatch(
                f"{self.path} has state but no certificate authority: restore {self.authority}, or use a new --home"
            )
        authority = Authority.create(self.authority) if fresh else Authority.load(self.authority)
        shutil.rmtree(self.serve, ignore_errors=True)
        for folder in (self.state, self.serve, self.inbox, self.uploads):
            folder.mkdir(mode=0o700, exist_ok=True)
        return authority

    def write_address(self, address: Address) -> None:
        write_file(self.path / "server.json", msgspec.json.encode(address))

    def address(self) -> Address | None:
        try:
            return msgspec.json.decode((self.path / "server.json").read_bytes(), type=Address)
        except FileNotFoundError:
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held while a server runs on this home. Errors: HomeBusy."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise HomeBusy(f"a server already runs on {self.path}: stop it, or give this one another --home") from None
        try:
            yield
        finally:
            lock.release()

    def is_served(self) -> bool:
        """Whether a server runs on this home now."""
        lock = filelock.FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False
