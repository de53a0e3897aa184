"""Output: checks that results can be written, made before hours of work, and standard streams that nobody reads."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from attune.common.durable import NO_SPACE, sync
from attune.common.errors import DiskFull, SettingError

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
