"""The audit log: devices let in, refused or revoked, and changed settings. One JSON line each, chained by digests.

Each line names the digest of the line before it, so a line that was changed, taken out or put in is noticed. Lines missing at
the end are noticed by an operator who has noted a later digest: `fedserver audit` prints the last one.

The server and the commands of its home write to one file. A line is synced before the decision that it notes becomes true. So
no decision is missing, and a line may be there for a decision that failed right afterwards.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import msgspec

from attune.common.durable import PRIVATE, disk_errors, sync, sync_with_name
from attune.common.errors import HomeMismatch, LedgerBusy
from attune.common.faults import SERVER, fail_at
from attune.common.text import from_json
from attune.fedserver.ports.ledger import AuditEntry, AuditHead

FIRST = "0" * 64  # the digest that the first line names, since there is no line before it
LOCK_S = 10.0
TAIL_BYTES = 1 << 16  # longer than nearly every line


class Audit:
    """The audit log as one file. Calls wait for the disk, and for another process that writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()  # between threads, which the other lock lets in together
        self._lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), mode=PRIVATE, thread_local=False)

    def write(self, event: str, by: str, **facts: Any) -> AuditHead:
        """Append one line, durably, and return its number and digest.

        A line that a killed process left unfinished is cut off, and another line notes that.

        Raises:
            DiskFull: There is no space for the line.
            LedgerBusy: Another process holds the file.
        """
        try:
            with self._turn, self._lock.acquire(timeout=LOCK_S), disk_errors(self.path):
                return head_of(self._append(event, by, facts))
        except filelock.Timeout:
            raise LedgerBusy(f"another process holds the audit log for longer than {LOCK_S:.0f} s") from None

    def _append(self, event: str, by: str, facts: dict[str, Any]) -> bytes:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            last, torn = _tail(fd)
            if torn:
                os.ftruncate(fd, os.fstat(fd).st_size - len(torn))
                last = _add(fd, last, "cut off", "server", {"unfinished": torn.decode(errors="replace")})
            line = _add(fd, last, event, by, facts)
        finally:
            os.close(fd)
        if last:
            sync(self.path)
        else:  # the file may be new
            sync_with_name(self.path)
        return line


def _tail(fd: int) -> tuple[bytes, bytes]:
    """Return the last whole line, and what comes after it. Reads from the end, in growing steps, until it has both."""
    size, asked = os.fstat(fd).st_size, TAIL_BYTES
    while True:
        end = os.pread(fd, asked, max(0, size - asked))
        if asked >= size or end.count(b"\n") >= 2:
            whole, _, torn = end.rpartition(b"\n")
            return whole.rpartition(b"\n")[2], torn
        asked *= 2


def _add(fd: int, last: bytes, event: str, by: str, facts: dict[str, Any]) -> bytes:
    line = next_line(last, event, by, facts)
    os.lseek(fd, 0, os.SEEK_END)
    half = len(line) // 2
    os.write(fd, line[:half])
    fail_at(SERVER, 0, "audit-half")
    os.write(fd, line[half:] + b"\n")
    return line


def next_line(last: bytes, event: str, by: str, facts: dict[str, Any]) -> bytes:
    """Return the line that follows `last` (empty: the first line), without its end."""
    number = from_json(last, AuditEntry).number + 1 if last else 1
    at = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
    return msgspec.json.encode(AuditEntry(number, at, event, by, facts, _digest_of(last) if last else FIRST))


def head_of(line: bytes) -> AuditHead:
    """Return the number and the digest of a line."""
    return AuditHead(from_json(line, AuditEntry).number, _digest_of(line))


def entries(path: Path) -> Iterator[tuple[AuditEntry, str]]:
    """Yield each entry of a file with its digest.

    An unfinished last line is left out: it never counted, and the next writer cuts it off.

    Raises:
        HomeMismatch: A line was changed, taken out or put in; the error names the first such line.
    """
    data = path.read_bytes() if path.exists() else b""
    return entries_in(data.split(b"\n")[:-1], str(path))


def entries_in(lines: Iterable[bytes], where: str) -> Iterator[tuple[AuditEntry, str]]:
    """Yield the entry of each line with its digest; `where` is what errors call the log.

    Raises:
        HomeMismatch: As for `entries`.
    """
    previous = FIRST
    for number, line in enumerate(lines, 1):
        try:
            entry = from_json(line, AuditEntry)
        except msgspec.MsgspecError as error:
            raise HomeMismatch(f"{where}, line {number}: it is no entry ({error}): restore the file from a backup") from None
        if (entry.number, entry.previous) != (number, previous):
            raise HomeMismatch(
                f"{where}, line {number}: it does not follow the line before it; lines were changed, taken out or put in: "
                "restore the file from a backup"
            )
        previous = _digest_of(line)
        yield entry, previous


def _digest_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
