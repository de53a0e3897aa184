"""Blobs as files below one folder: a blob's name is its path."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from attune.common.durable import disk_errors, replaced, sweep_files, sync, write_file
from attune.common.errors import UploadBusy
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable, check_space, read_into, write_all
from attune.common.wire.digest import digest_of
from attune.fedserver.ports.blobs import INBOX, REDO, SERVED, STATE, UPLOADS, Damaged
from attune.fedserver.stores.trust import Trust

AREAS = (STATE, INBOX, UPLOADS, SERVED, REDO)


class FolderBlobs(Trust):
    """Implements fedserver.ports.blobs.Blobs. Folders are made when they are needed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __repr__(self) -> str:
        return f"FolderBlobs({self._folder})"

    def create(self, name: str, size: int, durable: bool = True) -> _Target:
        return _Target(self, name, self._place(name), size, durable)

    def put(self, name: str, data: bytes) -> Blob:
        path = self._place(name)
        write_file(path, data)
        return self.known(Blob(name, digest_of(data), len(data)))

    def grow(self, name: str, size: int) -> _Growing:
        return _Growing(self, self._place(name), size)

    def get(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def size(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, prefix: str) -> list[str]:
        area = prefix.rpartition("/")[0]
        return sorted(name for name in self._below(f"{area}/" if area else "") if name.startswith(prefix))

    def _below(self, folder: str) -> Iterator[str]:
        """The names of all blobs in and below a folder, which ends with "/" or is "" for all."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder / folder) as found:
            for each in found:
                if each.is_dir(follow_symlinks=False):
                    yield from self._below(f"{folder}{each.name}/")
                elif each.is_file() and not each.name.startswith("."):
                    yield f"{folder}{each.name}"

    def move(self, blob: Blob, name: str) -> Blob:
        path = self._place(name)
        try:
            with disk_errors(path):
                (self._folder / blob.name).replace(path)
        except FileNotFoundError:
            raise Damaged(f"{self._folder / blob.name} is missing", blob.name) from None
        known = self._known.pop(blob.name, None)
        moved = Blob(name, blob.digest, blob.size)
        return moved if known is None else self.known(moved)

    def sync(self, blob: Blob) -> None:
        path = self._folder / blob.name
        try:
            with disk_errors(path):
                sync(path)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing", blob.name) from None

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            (self._folder / name).unlink(missing_ok=True)
        # Those of uploads stay: another part's upload may be about to begin in them.
        for folder in {(self._folder / name).parent for name in names if name.startswith(INBOX)}:
            with contextlib.suppress(OSError):  # there are other blobs in it, or it is gone
                folder.rmdir()

    def path(self, blob: Blob) -> Path | None:
        return self._folder / blob.name

    def sweep(self) -> None:
        for area in AREAS:
            for folder, _, _ in os.walk(self._folder / area):
                sweep_files(Path(folder))

    def known(self, blob: Blob) -> Blob:
        """The blob, whose bytes this process has written under its name."""
        self._known[blob.name] = blob.digest
        return blob

    def local(self, name: str) -> Path:
        """Where a name lies."""
        return self._folder / name

    def _place(self, name: str) -> Path:
        """Where a blob of this name is to be written; its folder is there, and its name durable."""
        path = self._folder / name
        if path.parent.is_dir():
            return path
        with disk_errors(path):
            missing = [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in missing:
                sync(folder.parent)
        return path

    def _source(self, name: str) -> Readable:
        try:
            return LocalFile(self._folder / name)
        except FileNotFoundError:
            raise KeyError(name) from None


class _Target:
    """A file that is written beside its place and takes it when it is finished."""

    def __init__(self, blobs: FolderBlobs, name: str, path: Path, size: int, durable: bool) -> None:
        self._blobs, self._blob_name, self.name = blobs, name, str(path)
        self._replacing = replaced(path, durable)
        try:
            self._file = LocalTarget(self._replacing.__enter__(), size)
        except BaseException as error:
            self._replacing.__exit__(type(error), error, None)
            raise

    def write(self, data: memoryview, offset: int) -> None:
        self._file.write(data, offset)

    def read_into(self, target: memoryview, offset: int) -> None:
        self._file.read_into(target, offset)

    def finish(self, digest: str, size: int) -> Blob:
        self._file.finish(digest, size)
        self._replacing.__exit__(None, None, None)
        return self._blobs.known(Blob(self._blob_name, digest, size))

    def abort(self) -> None:
        self._file.abort()


class _Growing:
    """A file that only grows, so its length is how far it came: true after kill -9, for the kernel has the bytes.

    After a power loss the tail may be missing or torn; then the digest at the end does not match, the file goes and the upload
    starts again. That is rare, costs one transfer, and spares what preallocation needs: a second, durable record of how far
    the bytes are good, with a sync every few MiB to keep it true. A lock sees to it that nobody else writes the same file.
    """

    def __init__(self, blobs: FolderBlobs, path: Path, size: int) -> None:
        self._blobs, self._path, self.name = blobs, path, str(path)
        self._fd = _open_locked(path)
        try:
            with disk_errors(path):
                self.size = os.fstat(self._fd).st_size
                if self.size > size:
                    os.ftruncate(self._fd, 0)
                    self.size = 0
                check_space(path, size - self.size)
        except BaseException:
            self.close()
            raise

    def append(self, data: memoryview) -> None:
        with disk_errors(self._path):
            for count in write_all(self._fd, data, self.size):
                self.size += count

    def read_into(self, target: memoryview, offset: int) -> None:
        read_into(self._fd, target, offset, self.name)

    def seal(self, name: str, digest: str) -> Blob:
        with disk_errors(self._path):
            self._path.rename(self._blobs.local(name))
        self.close()
        return self._blobs.known(Blob(name, digest, self.size))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_locked(path: Path) -> int:
    """The file of this name, locked. The lock may come just after its last holder renamed or removed the file: look again."""
    while True:
        with disk_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise UploadBusy(f"an upload to {path.name} is open already; close it, then go on") from None
        os.close(fd)
