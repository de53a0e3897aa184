"""Log of what has left a device, in its home: each kind of message with its count, its bytes and the last sample.

A line is appended before a message is given to the network. So a killed process has noted everything that it sent, except signs
of life (beats and progress): these are counted in memory and noted with the next line. The file is synced before an update is
handed in, so a power cut can lose only the lines after the last update. A message is noted once for each try, whether or not it
arrives. When the file is longer than LONGEST_BYTES, it is replaced by one line for each kind.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from attune.common.durable import PRIVATE, sync, sync_with_name, write_file
from attune.common.errors import DiskFull, HomeMismatch
from attune.common.exchange.messages import (
    Beat,
    Description,
    DownloadRequest,
    EnrolRequest,
    Hello,
    Progress,
    SecureMessage,
    StatisticsReport,
    Trouble,
    UnitReport,
    Update,
    UploadTarget,
)
from attune.common.text import aligned, clean, from_json, newer_format

FILE, FORMAT = "disclosed.jsonl", 1  # the format is higher if an older fedclient must not read it
LONGEST_BYTES = 256 << 10
LONGEST_SAMPLE = 2000  # characters of a sample's JSON
MOST_KINDS = 64  # parts have the names that the server gives them; what is more counts as OTHER
OTHER = "other"
_KINDS: Mapping[type, str] = {
    Hello: "hello",
    Progress: "progress",
    Beat: "beat",
    Trouble: "trouble",
    StatisticsReport: "statistics",
    UnitReport: "units",
    Description: "description",
    DownloadRequest: "question for a blob",
    UploadTarget: "question for an offset",
    EnrolRequest: "certificate request",
    bytes: "certificate renewal",
}


class Disclosed(msgspec.Struct, omit_defaults=True):
    """Messages of one kind: how many, their bytes, when the last one was sent (unix time) and what it said."""

    kind: str
    count: int = 0
    bytes: int = 0
    last: float = 0.0
    sample: Any = None


class _Heading(msgspec.Struct):
    """First line of the log."""

    format: int
    since: float  # unix time


class Disclosures(msgspec.Struct):
    """Content of a log."""

    format: int
    since: float  # unix time; 0: there is no log
    messages: list[Disclosed]
    damaged: int = 0  # lines that cannot be read


class DisclosureLog:
    """The log of one device. Only the process that holds the home's lock writes it; one that rested adds its last beats later.

    Args:
        home: The device's home.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        self._waiting: dict[str, Disclosed] = {}
        self._size: int | None = None  # bytes of the file, once this process has looked at it
        self._named = False  # its name is durable

    def note(self, message: object, size: int) -> None:
        """Note a message of `size` bytes that is about to be sent.

        Raises:
            OSError: The file cannot be written, so the message must not be sent. It is no DiskFull, because a server can have
                that error too, and transfers go on after it.
            HomeMismatch: A newer version of fedclient wrote the log.
        """
        line = Disclosed(_kind(message), 1, size, time.time(), _sample(message))
        if isinstance(message, (Beat, Progress)):
            _add(self._waiting, line)
            return
        inline = message.parts if isinstance(message, Update) else ()
        line.bytes -= sum(len(ref.data) for ref in inline)
        parts = [Disclosed(part_kind(ref.part), 1, len(ref.data), line.last, _sample(ref)) for ref in inline if ref.data]
        self._append(*parts, line)

    def note_part(self, target: UploadTarget) -> None:
        """Note that the upload of a part begins, or goes on after a break."""
        self._append(Disclosed(part_kind(target.part), 1, 0, time.time(), _sample(target)))

    def note_bytes(self, target: UploadTarget, size: int) -> None:
        """Note that `size` more bytes of a part are about to be sent."""
        self._append(Disclosed(part_kind(target.part), 0, size, time.time()))

    def flush(self) -> None:
        """Note the signs of life that were counted in memory."""
        if self._waiting:
            self._append()

    def sync(self) -> None:
        """Make everything that was noted durable against a power cut. This may take a moment."""
        (sync if self._named else sync_with_name)(self.path)
        self._named = True

    def _append(self, *lines: Disclosed) -> None:
        start = self._begin() if self._size is None or self._size > LONGEST_BYTES else b""
        text = start + b"".join(msgspec.json.encode(line) + b"\n" for line in (*self._waiting.values(), *lines))
        with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, PRIVATE)) as file:
            file.write(text)
        self._size = (self._size or 0) + len(text)
        self._waiting = {}

    def _begin(self) -> bytes:
        """Return the heading of a new file. A file that is too long or was cut off by a kill becomes one line for each kind."""
        kept = read_log(self.path)
        heading = msgspec.json.encode(_Heading(FORMAT, kept.since or time.time())) + b"\n"
        if not kept.since:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return heading
        self.path.chmod(PRIVATE)  # earlier versions let other users read it
        before = self.path.read_bytes()
        self._size = len(before)
        if kept.damaged or not before.endswith(b"\n") or self._size > LONGEST_BYTES:
            text = heading + b"".join(msgspec.json.encode(line) + b"\n" for line in kept.messages)
            try:
                write_file(self.path, text)
            except DiskFull:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from None
            self._size = len(text)
        return b""


def read_log(path: Path) -> Disclosures:
    """Return what a log says, with the sum of each kind. Without a file nothing has left.

    Raises:
        HomeMismatch: A newer version of fedclient wrote it.
    """
    try:
        first, *lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return Disclosures(FORMAT, 0.0, [])
    damaged, sums = 0, dict[str, Disclosed]()
    try:
        if newer := newer_format(first, path, "fedclient"):
            raise HomeMismatch(newer)
        heading = from_json(first, _Heading)
    except msgspec.DecodeError:
        heading, damaged = _Heading(FORMAT, path.stat().st_mtime), 1
    for line in lines:
        try:
            _add(sums, from_json(line, Disclosed))
        except msgspec.DecodeError:
            damaged += 1
    return Disclosures(heading.format, heading.since, sorted(sums.values(), key=lambda entry: entry.kind), damaged)


def as_object(log: Disclosures) -> dict[str, Any]:
    """Return a log as an object of JSON: times are in ISO 8601, UTC."""
    messages = {
        line.kind: {"count": line.count, "bytes": line.bytes, "last": _time(line.last), "sample": line.sample}
        for line in log.messages
    }
    return {"format": log.format, "since": _time(log.since), "damaged_lines": log.damaged, "messages": messages}


def lines_of(log: Disclosures) -> list[str]:
    """Return a log as lines for people: a table, then a sample of each kind."""
    if not log.since:
        return ["nothing has left this device, or it is of a version that kept no log"]
    rows = [("kind", "messages", "bytes", "last")]
    rows += [(line.kind, f"{line.count:,}", f"{line.bytes:,}", _time(line.last) or "") for line in log.messages]
    samples = [f"last {line.kind}: {msgspec.json.encode(line.sample).decode()}" for line in log.messages if line.sample]
    torn = [f"{log.damaged} lines of the log cannot be read: a kill in the middle of a line, or damage"] if log.damaged else []
    return [f"what has left since {_time(log.since)}", *aligned(rows), *samples, *torn]


def _time(at: float) -> str | None:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds") if at else None


def moved(old: Path, new: Path) -> None:
    """Move the log of one home to another one that has none: that of `fedclient join` to the device's own."""
    if (old / FILE).exists() and not (new / FILE).exists():
        (old / FILE).rename(new / FILE)


def part_kind(part: str) -> str:
    """Return the kind of a part's bytes."""
    return f"part {clean(part, 40)}"


def _add(sums: dict[str, Disclosed], line: Disclosed) -> None:
    kind = line.kind if line.kind in sums or len(sums) < MOST_KINDS else OTHER
    total = sums.setdefault(kind, Disclosed(kind))
    total.count, total.bytes = total.count + line.count, total.bytes + line.bytes
    total.last = max(total.last, line.last)
    total.sample = line.sample if line.sample is not None else total.sample


def _kind(message: object) -> str:
    if isinstance(message, SecureMessage):
        return f"secure aggregation: {'refusal' if message.refused else message.exchange}"
    if isinstance(message, Update):
        return "masked update" if message.attempt else "update" if message.parts else "report"
    return _KINDS.get(type(message), OTHER)


def _sample(message: object) -> Any:
    """Return what a message says, without tensors and keys, as JSON of bounded length."""
    for most in (20, 3, 1):
        sample = _plain(message, most)
        if len(msgspec.json.encode(sample)) <= LONGEST_SAMPLE:
            return sample
    return clean(msgspec.json.encode(sample).decode(), LONGEST_SAMPLE)


def _plain(value: Any, most: int) -> Any:
    if isinstance(value, msgspec.Struct):
        shown = msgspec.structs.asdict(value)
        json = {name: msgspec.json.decode(text) for name, text in shown.items() if text and name.endswith("_json")}
        return {name: _plain(inner, most) for name, inner in (shown | json).items() if inner not in (b"", "", None, ())}
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        return clean(value, 200)
    if isinstance(value, Mapping):
        return {clean(str(name), 60): _plain(inner, most) for name, inner in list(value.items())[:60]}
    if isinstance(value, Sequence):
        more = [f"and {len(value) - most:,} more"] if len(value) > most else []
        return [_plain(inner, most) for inner in value[:most]] + more
    return value
