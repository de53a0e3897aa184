"""The server's home on disk: its layout, its lock, and how a new one is made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import msgspec

from attune.common.durable import sweep_files, write_file
from attune.common.errors import HomeBusy, HomeMismatch
from attune.common.text import from_json
from attune.fedserver.identity.authority import CERTIFICATE_FILE, Authority
from attune.fedserver.stores.audit import Audit

LEFT_ASIDE = ".backup-"  # the name of a folder in which a backup sets files aside begins with it


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
    def runs(self) -> Path:
        """Earlier runs of this home's devices, each a folder that can be looked at like a home."""
        return self.path / "runs"

    @property
    def audit(self) -> Audit:
        return Audit(self.path / "audit.jsonl")

    @property
    def local_token(self) -> Path:
        return self.path / "local-token"

    def exists(self) -> bool:
        return self.database.exists()

    def require(self) -> None:
        """Errors: HomeMismatch if no server has ever used this folder."""
        if not self.exists():
            raise HomeMismatch(f"{self.path} holds no federation: start one there with `fedserver --home {self.path}`")

    def check(self) -> None:
        """Errors: HomeMismatch if something of a federation is here, but not all that it needs.

        The database is made first and the authority last, so an authority or state without a database was not left by a crash.
        """
        remains = [path for path in (self.authority / CERTIFICATE_FILE, self.state, self.inbox) if _holds_something(path)]
        if remains and not self.database.exists():
            raise HomeMismatch(
                f"{self.database} is missing, but {remains[0]} is of a federation: restore the database from a backup, "
                "or use a new --home"
            )
        if _holds_something(self.state) and not (self.authority / CERTIFICATE_FILE).exists():
            raise HomeMismatch(
                f"{self.path} has state but no certificate authority: restore {self.authority}, or use a new --home"
            )

    def create(self) -> None:
        """The folders of a home, made or completed, and closed to other users. What is only of one process is emptied."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.path, self.authority, self.operator):
            sweep_files(folder)
        for left in (self.serve, *self.path.glob(f"{LEFT_ASIDE}*")):
            shutil.rmtree(left, ignore_errors=True)
        for folder in (self.state, self.serve, self.inbox, self.uploads):
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.path, self.authority, self.operator, self.state, self.serve, self.inbox, self.uploads):
            if folder.exists():
                folder.chmod(0o700)

    def open_authority(self) -> Authority:
        """The authority that this home belongs to; a new one for a new home. Errors: HomeMismatch if it is damaged."""
        if (self.authority / CERTIFICATE_FILE).exists():
            return Authority.load(self.authority)
        return Authority.create(self.authority)

    def write_address(self, address: Address) -> None:
        write_file(self.path / "server.json", msgspec.json.encode(address))

    def address(self) -> Address | None:
        """Where this home was served last. Errors: HomeMismatch if that is damaged."""
        path = self.path / "server.json"
        try:
            return from_json(path.read_bytes(), Address)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise HomeMismatch(
                f"{path} is damaged ({error}): remove it, and start with the --host and --port that devices know"
            ) from None

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


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
