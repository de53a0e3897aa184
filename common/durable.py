"""The one way to write what must survive a power cut: under another name, synced, then renamed into place.

So a name never shows half a file or half a folder. The functions differ only in what they put in place.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attune.common.errors import DiskFull

PRIVATE = 0o600
PUBLIC = 0o644
FILLING = ".filling-"  # the name of an unfinished folder begins with it
_BESIDE = re.compile(r"\..*\.[0-9a-f]{12}\.tmp")  # the name of an unfinished file
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, data: bytes, mode: int = PRIVATE, durable: bool = True) -> None:
    """Replaces `path` by `data`; its folder is made if need be. Errors: DiskFull; other OSErrors pass."""
    with disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The mode is set at creation, so other users can read a key at no moment.
    with replaced(path, durable) as beside, open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)


@contextmanager
def replaced(path: Path, durable: bool = True) -> Iterator[Path]:
    """The name of a file to write beside `path`, which takes the place of `path` when the `with` block ends well.

    After an exception it is removed, and `path` is as it was. Errors: DiskFull; other OSErrors pass.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with disk_errors(path):
            yield beside
            if durable:
                sync(beside)
            beside.replace(path)
            if durable:
                sync(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def committed_folder(final: Path) -> Iterator[Path]:
    """An empty folder to fill, which gets the name `final` when the `with` block ends well.

    The files in it, their names and that of the folder become durable here, before it gets its name: who fills it need not
    sync. After an exception the folder is removed with all that is in it; after a kill it is left for `sweep`. One caller at a
    time for each `final`. Errors: DiskFull; other OSErrors pass, such as that of a `final` that is there and not empty.
    """
    filling = final.with_name(f"{FILLING}{final.name}")
    try:
        with disk_errors(final):
            shutil.rmtree(filling, ignore_errors=True)
            filling.mkdir(parents=True)
            yield filling
            for path in sorted(filling.iterdir()):
                sync(path)
            sync(filling)
            filling.rename(final)
            sync(final.parent)
    except BaseException:
        shutil.rmtree(filling, ignore_errors=True)
        raise


def discard_folder(folder: Path) -> None:
    """Removes a folder with all that is in it. A kill leaves it whole under its name, or under one that `sweep` removes."""
    going = folder.with_name(f"{FILLING}{folder.name}")
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes the folders in `folder` that a killed process has left unfinished."""
    for filling in folder.glob(f"{FILLING}*"):
        shutil.rmtree(filling)


def sweep_files(folder: Path) -> None:
    """Removes the files in `folder` (not below it) that a killed process has left unfinished."""
    for path in folder.glob(".*.tmp"):
        if _BESIDE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Brings the bytes of a file, or the names in a folder, to stable storage: a power cut no longer undoes them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_with_name(path: Path) -> None:
    """Brings a file that was written under its own name to stable storage, name included."""
    sync(path)
    sync(path.parent)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, or a full quota, into DiskFull; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(f"the disk of {path.parent} is full; free some space, then start again") from error
        raise
