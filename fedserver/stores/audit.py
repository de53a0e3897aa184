"""The audit log: who was let in, refused or shut out, and which setting changed. One JSON line each, chained by digests.

Each line names the digest of the line before it, so that none can be changed, taken out or put in unnoticed. What is missing at
the end shows only to who has noted a later digest: `fedserver audit` prints the last one.

The server and the commands of its home write to one file. A line is synced before what it tells of becomes true: what happened
is never missing, and what failed right afterwards may be there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import msgspec

from attune.common.durable import PRIVATE, disk_errors, sync, sync_with_name
from attune.common.errors import HomeMismatch, LedgerBusy
from attune.common.faults import SERVER, fail_at
from attune.common.text import from_json

FIRST = "0" * 64  # what the first line names
LOCK_S = 10.0
TAIL_BYTES = 1 << 16  # longer than nearly every line


class Entry(msgspec.Struct, frozen=True):
    """One line. facts: of the event, by name."""

    number: int  # from 1
    at: str  # UTC, ISO 8601
    event: str
    by: str
    facts: dict[str, Any]
    previous: str  # SHA-256 of the line before, without its end


def digest_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


class Audit:
    """One file. Plain calls that wait for the disk, and for another process that writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), mode=PRIVATE, thread_local=False)

    def __repr__(self) -> str:
        return f"Audit({self.path})"

    def write(self, event: str, by: str, **facts: Any) -> None:
        """Appends one line, durably. What a killed process has left of a line is cut off, and said.

        Errors: DiskFull; LedgerBusy if another process holds the file.
        """
        try:
            with self._lock.acquire(timeout=LOCK_S), disk_errors(self.path):
                self._append(event, by, facts)
        except filelock.Timeout:
            raise LedgerBusy(f"another process holds the audit log for longer than {LOCK_S:.0f} s") from None

    def _append(self, event: str, by: str, facts: dict[str, Any]) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            last, torn = _tail(fd)
            if torn:
                os.ftruncate(fd, os.fstat(fd).st_size - len(torn))
                last = _add(fd, last, "cut off", "server", {"unfinished": torn.decode(errors="replace")})
            _add(fd, last, event, by, facts)
        finally:
            os.close(fd)
        if last:
            sync(self.path)
        else:  # the file may be new
            sync_with_name(self.path)


def _tail(fd: int) -> tuple[bytes, bytes]:
    """The last whole line, and what comes after it: read from the end, for as long as it takes to have both."""
    size, asked = os.fstat(fd).st_size, TAIL_BYTES
    while True:
        end = os.pread(fd, asked, max(0, size - asked))
        if asked >= size or end.count(b"\n") >= 2:
            whole, _, torn = end.rpartition(b"\n")
            return whole.rpartition(b"\n")[2], torn
        asked *= 2


def _add(fd: int, last: bytes, event: str, by: str, facts: dict[str, Any]) -> bytes:
    number = from_json(last, Entry).number + 1 if last else 1
    at = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
    line = msgspec.json.encode(Entry(number, at, event, by, facts, digest_of(last) if last else FIRST))
    os.lseek(fd, 0, os.SEEK_END)
    half = len(line) // 2
    os.write(fd, line[:half])
    fail_at(SERVER, 0, "audit-half")
    os.write(fd, line[half:] + b"\n")
    return line


def entries(path: Path) -> Iterator[tuple[Entry, str]]:
    """Each line with its digest. An unfinished last line is left out: it never counted, and the next writer cuts it off.

    Errors: HomeMismatch that names the first line that was not written so.
    """
    data = path.read_bytes() if path.exists() else b""
    previous = FIRST
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            entry = from_json(line, Entry)
        except msgspec.MsgspecError as error:
            raise HomeMismatch(f"{path}, line {number}: it is no entry ({error}): restore the file from a backup") from None
        if (entry.number, entry.previous) != (number, previous):
            raise HomeMismatch(
                f"{path}, line {number}: it does not follow the line before it; lines were changed, taken out or put in: "
                "restore the file from a backup"
            )
        previous = digest_of(line)
        yield entry, previous
