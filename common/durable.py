"""Writes small secret files whole: never half a file, never readable by others, safe after a power cut."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from attune.common.errors import DiskFull

PRIVATE = 0o600
PUBLIC = 0o644


def write_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replaces `path` by `data` in one rename, with fsync of file and folder. Raises DiskFull; other OSErrors pass."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        # The mode is given at creation, so that there is no moment at which a key lies open to others.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"No space left to write {path}. Free some space and start again.") from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
