"""Durable writing of files and folders: written under another name, synced, then renamed into place; and checks before work.

A name never shows half a file or half a folder, not even after a power cut. Before hours of work it is checked that the results
can be written, and standard streams that nobody reads are replaced.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attune.common.errors import DiskFull, SettingError

PRIVATE = 0o600
PUBLIC = 0o644
FILLING = ".filling-"  # the name of an unfinished folder begins with it
_BESIDE = re.compile(r"\..*\.[0-9a-f]{12}\.tmp")  # the name of an unfinished file
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, data: bytes, mode: int = PRIVATE, durable: bool = True) -> None:
    """Replace the file `path` by `data`; missing folders are made.

    Raises:
        DiskFull: There is no space; other OSErrors pass.
    """
    with disk_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The mode is set at creation, so that other users can never read a key.
    with replaced(path, durable) as beside, open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)


@contextmanager
def replaced(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield the name of a temporary file, which replaces `path` at the end of the `with` block.

    After an exception the temporary file is removed, and `path` stays as it was.

    Raises:
        DiskFull: There is no space; other OSErrors pass.
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
    """Yield an empty folder to fill, which gets the name `final` at the end of the `with` block.

    The files and their names are synced here, before the folder gets its name. After an exception the folder is removed with
    its files; after a kill it is left for `sweep`. Only one caller at a time may use a name.

    Raises:
        DiskFull: There is no space; other OSErrors pass, such as that for a `final` that exists and is not empty.
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
    """Remove a folder with its files. A kill leaves it whole under its own name, or under one that `sweep` removes."""
    going = folder.with_name(f"{FILLING}{folder.name}")
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the unfinished folders in `folder` that a killed process has left."""
    for filling in folder.glob(f"{FILLING}*"):
        shutil.rmtree(filling)


def sweep_files(folder: Path) -> None:
    """Remove the unfinished files directly in `folder` that a killed process has left."""
    for path in folder.glob(".*.tmp"):
        if _BESIDE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder, to stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_with_name(path: Path) -> None:
    """Sync a file that was written under its final name, and the name too."""
    sync(path)
    sync(path.parent)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise DiskFull in place of an OSError for a full disk or quota; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(f"the disk of {path.parent} is full; free some space, then start again") from error
        raise


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of a file that a stranger may have made.

    Raises:
        OSError: The file cannot be read, is a pipe or a device (whose reader would wait), or holds more than `limit` bytes.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it holds more than {limit:,} bytes", str(path))
    return data


_PROBE = b"x" * 4096


def check_folder(folder: Path, option: str = "--out") -> None:
    """Check that files can be written into a folder, or that a folder that does not exist yet can be made.

    No folder is made: another device may share those above it, and must not see them come and go.

    Args:
        folder: The folder.
        option: Option that the user can change, for the message.

    Raises:
        SettingError: It cannot be a folder, or this user may not write there.
        DiskFull: The disk has no space.
    """
    folder = folder.absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            raise SettingError(f"{folder} cannot be a folder, because {there} is a file; choose another {option}")
        _probe(there)
    except OSError as error:
        raise _error(folder, error, option) from None


def check_file(path: Path, option: str = "--out") -> None:
    """Check that a file can be written, as `check_folder` does for its folder.

    Raises:
        SettingError: It is a folder, or its folder does not exist, or this user may not write there.
        DiskFull: The disk has no space.
    """
    if path.is_dir():
        raise SettingError(f"{path} is a folder, and a file is needed; choose another {option}")
    if path.exists() and not path.is_file():
        return  # a device such as /dev/stdout
    if not path.absolute().parent.exists():
        raise SettingError(f"there is no folder {path.absolute().parent} for {path.name}; make it, or choose another {option}")
    if path.exists() and not os.access(path, os.W_OK):
        raise SettingError(f"{path} may not be written by this user; choose another {option}")
    check_folder(path.parent, option)


def _probe(folder: Path) -> None:
    probe = folder / f".attune-{secrets.token_hex(6)}.tmp"
    try:
        with probe.open("xb") as file:
            file.write(_PROBE)
        sync(probe)
    finally:
        probe.unlink(missing_ok=True)


def _error(folder: Path, error: OSError, option: str) -> SettingError | DiskFull:
    if error.errno in NO_SPACE:
        return DiskFull(f"no space left in {folder}; free some, or choose another {option}")
    return SettingError(f"cannot write to {folder}: {error.strerror or error}; choose another {option}")


def open_streams() -> None:
    """Put the null device in the place of standard streams that are closed.

    Else the next file that is opened gets the number of such a stream, and what a library prints there goes into the file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one, unless a library has a file there
        setattr(sys, name, open(nowhere, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def forget_output(line: str) -> None:
    """Say on stderr that nobody reads stdout, and write to it no more: each further line would fail again.

    Args:
        line: Text of the line.
    """
    dead = [sys.stdout]
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        dead.append(sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in dead:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
