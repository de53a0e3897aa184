"""Blobs and uploads as files below one folder: a name is a path, and content that is kept by two names is one file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from attune.common.durable import disk_errors, replaced, sweep_files, sync, write_file
from attune.common.errors import UploadBusy
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable, check_space, read_into, write_all
from attune.common.wire.digest import digest_of
from attune.fedserver.ports.blobs import INBOX, REDO, SERVED, STATE, UPLOADS, Damaged
from attune.fedserver.stores.checked_blobs import SEALED, CheckedBlobs, sealed_among, upload_name

AREAS = (STATE, INBOX, UPLOADS, SERVED, REDO)
MADE_AT_START = (STATE, SERVED, INBOX, UPLOADS)


class FolderBlobs(CheckedBlobs):
    """Implements ports.blobs.Blobs. Folders are made when they are needed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def create(self, name: str, size: int, durable: bool = True) -> _FolderTarget:
        return _FolderTarget(self, name, self.place(name), size, durable)

    def put(self, name: str, data: bytes) -> Blob:
        path = self.place(name)
        write_file(path, data)
        return self.known(Blob(name, digest_of(data), len(data)))

    def keep(self, blob: Blob, name: str) -> Blob:
        self.sync(blob)  # before the link, which changes the file: a later sync would write once more
        with self._whole(blob), replaced(self.place(name), durable=False) as beside:
            if not link(self._folder / blob.name, beside):
                sync(beside)
        self._known.pop(name, None)
        kept = Blob(name, blob.digest, blob.size)
        return self.known(kept) if self.is_known(blob) else kept

    def sync(self, blob: Blob) -> None:
        path = self._folder / blob.name
        with self._whole(blob), disk_errors(path):
            sync(path)

    @contextlib.contextmanager
    def _whole(self, blob: Blob) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Damaged(f"{self._folder / blob.name} is missing", blob.name) from None

    def get(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def names(self, prefix: str) -> list[str]:
        area = prefix.rpartition("/")[0]
        return sorted(name for name in self._below(f"{area}/" if area else "") if name.startswith(prefix))

    def _below(self, folder: str) -> Iterator[str]:
        """Yield the names of all blobs in and below a folder, which ends with "/" or is "" for all."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder / folder) as paths:
            for path in paths:
                if path.is_dir(follow_symlinks=False):
                    yield from self._below(f"{folder}{path.name}/")
                elif path.is_file() and not path.name.startswith("."):
                    yield f"{folder}{path.name}"

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            (self._folder / name).unlink(missing_ok=True)
        # Folders of uploads stay: the upload of another part may be about to begin there.
        for folder in {(self._folder / name).parent for name in names if name.startswith(INBOX)}:
            with contextlib.suppress(OSError):  # there are other blobs in it, or it is gone
                folder.rmdir()

    def sweep(self) -> None:
        for area in AREAS:
            for folder, _, _ in os.walk(self._folder / area):
                sweep_files(Path(folder))

    def known(self, blob: Blob) -> Blob:
        """Note that this process has written these bytes; return the blob."""
        self._known[blob.name] = blob.digest
        return blob

    def is_known(self, blob: Blob) -> bool:
        """Return whether this process has written or compared these bytes."""
        return self._known.get(blob.name) == blob.digest

    def local(self, name: str) -> Path:
        """Return the path of a name."""
        return self._folder / name

    def place(self, name: str) -> Path:
        """Return the path of a name; its folder is there, and durable."""
        path = self._folder / name
        if path.parent.is_dir():
            return path
        with disk_errors(path):
            missing = [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in missing:
                sync(folder.parent)
        return path

    def source(self, name: str) -> Readable:
        try:
            return LocalFile(self._folder / name)
        except FileNotFoundError:
            raise KeyError(name) from None


class _FolderTarget:
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


class FolderSpool:
    """Implements ports.blobs.Spool: each upload is a file that only grows, and gets another name when it is sealed."""

    def __init__(self, blobs: FolderBlobs) -> None:
        self._blobs = blobs

    def grow(self, sender: str, digest: str, size: int) -> _FolderUpload:
        name = upload_name(sender, digest)
        whole = Blob(f"{name}{SEALED}", digest, size)
        sealed = self._blobs.place(whole.name)
        if _size(sealed) == size:  # nothing is missing; the file may have other names, so it must never be written to
            return _FolderUpload(self._blobs, sealed, whole)
        self._blobs.remove([whole.name])
        return _FolderUpload(self._blobs, self._blobs.local(name), whole)

    def offset(self, sender: str, digest: str) -> int:
        name = upload_name(sender, digest)
        sealed = _size(self._blobs.local(f"{name}{SEALED}"))
        return sealed if sealed is not None else _size(self._blobs.local(name)) or 0

    def sealed(self, sender: str, digest: str) -> Blob | None:
        name = f"{upload_name(sender, digest)}{SEALED}"
        size = _size(self._blobs.local(name))
        return None if size is None else Blob(name, digest, size)

    def all_sealed(self) -> list[Blob]:
        names = sealed_among(self._blobs.names(UPLOADS))
        return [Blob(name, digest, _size(self._blobs.local(name)) or 0) for name, digest in names]

    def keep_only(self, sender: str, digest: str) -> None:
        kept = upload_name(sender, digest)
        uploads = self._blobs.names(f"{UPLOADS}{sender}.")
        self._blobs.remove([name for name in uploads if name not in (kept, f"{kept}{SEALED}")])


class _FolderUpload:
    """A file whose length is how far the upload came. That is true after kill -9, for the kernel has the bytes.

    After a power cut the end may be missing or torn. Then the digest does not match, the file goes, and the upload begins anew.
    That is rare and costs one transfer. Preallocation would need a second durable record of how many bytes are good, with a
    sync every few MiB. A lock keeps others from writing to the same file.
    """

    def __init__(self, blobs: FolderBlobs, path: Path, whole: Blob) -> None:
        self._blobs, self._path, self._whole, self.name = blobs, path, whole, str(path)
        self._fd = _open_locked(path)
        try:
            with disk_errors(path):
                self.size = os.fstat(self._fd).st_size
                if self.size > whole.size:
                    os.ftruncate(self._fd, 0)
                    self.size = 0
                check_space(path, whole.size - self.size)
        except BaseException:
            self.close()
            raise

    def append(self, data: memoryview) -> None:
        with disk_errors(self._path):
            for count in write_all(self._fd, data, self.size):
                self.size += count

    def read_into(self, target: memoryview, offset: int) -> None:
        read_into(self._fd, target, offset, self.name)

    def seal(self) -> Blob:
        whole = self._blobs.local(self._whole.name)
        if self._path != whole:  # else it was sealed before, and may have been accepted and removed meanwhile
            with disk_errors(self._path):
                self._path.rename(whole)
        self.close()
        return self._blobs.known(Blob(self._whole.name, self._whole.digest, self.size))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_folders(folder: Path) -> None:
    """Make the folders of blobs, closed to other users, and empty the folder of what is served."""
    shutil.rmtree(folder / SERVED, ignore_errors=True)
    for name in MADE_AT_START:
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        (folder / name).chmod(0o700)


def clear_folders(folder: Path) -> None:
    """Remove all blobs of a folder."""
    for area in AREAS:
        shutil.rmtree(folder / area, ignore_errors=True)
    make_folders(folder)


def link(path: Path, to: Path) -> bool:
    """Link a file to a new name, or copy it where the file system has no links; return whether it is a link.

    Raises:
        FileNotFoundError: There is no such file.
    """
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, to)
        return False
    return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _open_locked(path: Path) -> int:
    """Open the file of this name, locked. The lock may come just after its holder renamed or removed the file: look again."""
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
