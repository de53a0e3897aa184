"""The server's home on disk: keys, lock, address and earlier runs; how a new home is made, and its storage opened.

This module owns `ca/`, `operator/`, `local-token`, `server.json`, `lock` and `runs/`. `features.web` owns the files of
the dashboard and of /metrics, and the storage (`fedserver.stores.disk`) owns the rest.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import msgspec

from attune.common import aio
from attune.common.durable import check_folder, sweep_files, write_file
from attune.common.errors import HomeBusy, HomeMismatch, SettingError
from attune.common.text import from_json, host_and_port, newer_format
from attune.fedserver.identity.authority import CERTIFICATE_FILE, Authority
from attune.fedserver.ports.ledger import LedgerReader, Snapshot
from attune.fedserver.ports.storage import HomeStorage
from attune.fedserver.stores.disk import DiskStorage
from attune.seams import remote_storage

EVERY_HOST = ("0.0.0.0", "::", "[::]")  # noqa: S104 - to listen on all addresses
STORAGE_FILE = "storage.json"
BACKUP_MADE = "backup made"  # event of the audit log
LEFT_ASIDE = ".backup-"  # the name of a folder in which a backup sets files aside begins with it


class StoragePlace(msgspec.Struct, frozen=True):
    """The contents of storage.json: where ledger and blobs are, if they are not in the home. The URLs have no secrets."""

    ledger: str
    blobs: str


class ServedAddress(msgspec.Struct):
    """The contents of server.json: where the running (or last) server listens, and its process.

    Attributes:
        waits: Of a standby, what it waits for before it listens there.
    """

    host: str
    port: int
    pid: int
    format: int = 1
    waits: str | msgspec.UnsetType = msgspec.UNSET

    def joined(self, advertised: str) -> str:
        """Return HOST:PORT for join lines: the setting `server.advertise`, or the name of this machine."""
        if advertised:
            host, port = host_and_port(advertised)
            return f"{host}:{port or self.port}"
        host = socket.gethostname() if self.host in EVERY_HOST else self.host
        return f"[{host}]:{self.port}" if ":" in host and not host.startswith("[") else f"{host}:{self.port}"


def place_of(ledger: str | None, blobs: str | None) -> StoragePlace | None:
    """Return the place that two options name; None if they name none.

    Raises:
        SettingError: Only one of them is given.
    """
    if (ledger is None) != (blobs is None):
        raise SettingError("--ledger postgresql://... and --blobs s3://... go together: give both, or none")
    return None if ledger is None or blobs is None else StoragePlace(ledger, blobs)


class ServerHome(msgspec.Struct, frozen=True):
    """A folder that holds one federation. Only `create` and the `write_...` methods write."""

    path: Path
    chosen: StoragePlace | None = None  # by the options of a start

    @property
    def authority(self) -> Path:
        """Folder of the federation's certificate authority."""
        return self.path / "ca"

    @property
    def operator(self) -> Path:
        """Folder of the credential with which the commands of this home call the server."""
        return self.path / "operator"

    @property
    def runs(self) -> Path:
        """Folder of earlier runs of this home's devices, each a folder that can be read like a home."""
        return self.path / "runs"

    @property
    def local_token(self) -> Path:
        """File with the join token for devices of this user on this machine."""
        return self.path / "local-token"

    def open(self) -> HomeStorage:
        """Return the storage of this home: ledger, readers for views, and blobs. Each is opened when it is first used.

        Raises:
            HomeMismatch: storage.json is damaged.
            SettingError: The place cannot be, or what reaches it is not installed.
        """
        place = self.storage_place() or self.chosen
        return DiskStorage(self.path) if place is None else remote_storage(self.path, place.ledger, place.blobs)

    def storage_place(self) -> StoragePlace | None:
        """Return where ledger and blobs are; None: in this folder.

        Raises:
            HomeMismatch: storage.json is damaged.
        """
        path = self.path / STORAGE_FILE
        try:
            return from_json(path.read_bytes(), StoragePlace)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise HomeMismatch(f"{path} is damaged ({error}): remove it, and start with --ledger and --blobs") from None

    def exists(self) -> bool:
        """Return whether a server has used this folder."""
        return self.open().exists()

    def require(self) -> None:
        """Check that a server has used this folder.

        Raises:
            HomeMismatch: No server has ever used it.
        """
        if not self.exists():
            raise HomeMismatch(f"{self.path} holds no federation: start one there with `fedserver --home {self.path}`")

    @contextlib.contextmanager
    def reading(self) -> Iterator[LedgerReader]:
        """Give the reader of the ledger during the block.

        Raises:
            HomeMismatch: There is no federation here, or the ledger is damaged.
            LedgerBusy: The ledger cannot be read now.
        """
        self.require()
        with contextlib.closing(self.open().reader()) as reader:
            yield reader

    def snapshot(self) -> Snapshot:
        """Return what the ledger holds now.

        Raises:
            HomeMismatch, LedgerBusy: As for `reading`.
        """
        with self.reading() as reader:
            return reader.snapshot()

    def note(self, event: str, by: str, **facts: Any) -> None:
        """Append an entry to the audit log, for a command.

        Raises:
            DiskFull, LedgerBusy: As for `MemberLedger.note`.
        """

        async def write() -> None:
            async with self.open() as storage:
                await storage.ledger.note(event, by, **facts)

        aio.run(write())

    def check(self) -> None:
        """Check that nothing of a federation is missing.

        Raises:
            HomeMismatch: Something of a federation is here, but not all that it needs; or its state is at another place than
                the one that was chosen.
        """
        place = self.storage_place()
        if self.chosen is not None and (self.chosen != place if place else DiskStorage(self.path).exists()):
            where = f"{place.ledger} and {place.blobs}" if place else f"{self.path} itself"
            raise HomeMismatch(f"the state of this home is in {where}: move it with `fedserver migrate`")
        self.open().check(self.authority / CERTIFICATE_FILE)

    def create(self) -> None:
        """Make or complete the folders of a home, closed to other users. What belongs to one process alone is removed."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.path, self.authority, self.operator):
            sweep_files(folder)
        for left in self.path.glob(f"{LEFT_ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
        for folder in (self.path, self.authority, self.operator):
            if folder.exists():
                folder.chmod(0o700)
        self.open().create()

    def open_authority(self) -> Authority:
        """Return the authority of this home; a new one for a new home.

        Raises:
            HomeMismatch: The authority is damaged.
        """
        if (self.authority / CERTIFICATE_FILE).exists():
            return Authority.load(self.authority)
        return Authority.create(self.authority)

    def write_storage_place(self, place: StoragePlace) -> None:
        """Write where ledger and blobs are from now on."""
        write_file(self.path / STORAGE_FILE, msgspec.json.encode(place))

    def write_address(self, address: ServedAddress) -> None:
        """Write where this home is served."""
        write_file(self.path / "server.json", msgspec.json.encode(address))

    def address(self) -> ServedAddress | None:
        """Return where this home was served last.

        Raises:
            HomeMismatch: server.json is damaged, or a newer version wrote it.
        """
        path = self.path / "server.json"
        try:
            text = path.read_bytes()
            if newer := newer_format(text, path, "fedserver"):
                raise HomeMismatch(newer)
            return from_json(text, ServedAddress)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise HomeMismatch(
                f"{path} is damaged ({error}): remove it, and start with the --host and --port that devices know"
            ) from None

    def served_at(self) -> str | None:
        """Return HOST:PORT of the server that runs on this home now; None if none runs, or it is a standby."""
        address = self.address() if self.is_served() else None
        return f"{address.host}:{address.port}" if address and not address.waits else None

    def standby(self) -> str:
        """Return what the standby that runs on this home waits for; empty if none runs."""
        address = self.address() if self.is_served() else None
        return address.waits or "" if address else ""

    @contextlib.contextmanager
    def locked(self, waits: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the lock of this home during the block, and that of its storage, as each server does while it runs.

        Args:
            waits: As for `HomeStorage.alone`.

        Raises:
            HomeBusy: A server runs on this home.
        """
        check_folder(self.path, "--home")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "lock", thread_local=False)  # a standby takes it on a thread of its own
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise HomeBusy(f"a server already runs on {self.path}: stop it, or give this one another --home") from None
        try:
            if self.chosen is not None:  # while it waits, commands on this machine need it
                self.write_storage_place(self.chosen)
            with self.open().alone(waits):
                yield
        finally:
            lock.release()

    def is_served(self) -> bool:
        """Return whether a server runs on this home now."""
        lock = filelock.FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False
