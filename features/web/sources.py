"""Facts of the page from a ledger: that of a running server, of a simulation, or of a home."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Protocol

import msgspec

from attune.common.identity.credential import short_form
from attune.common.plan import run_name
from attune.common.text import clean, from_json
from attune.features.web.facts import AttentionMatrix, CondensedReports, HomeFacts, Kind, LoggedFault, PageFacts
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import DeviceActivity
from attune.fedserver.home import BACKUP_MADE, ServerHome
from attune.fedserver.identity.authority import authority_certificate_in
from attune.fedserver.lab.aggregators.stored import MATRICES, ArrayFile, read_matrices
from attune.fedserver.ports.blobs import blob_of, read_again
from attune.fedserver.ports.ledger import AuditEntry, Snapshot
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.sqlite import AUDIT_FILE
from attune.fedserver.view.status import status

NO_ATTENTION = "{} stores no matrix of which device learns from which; fedmcsa, fedamp and their relatives do"
TOO_EARLY = "There is no matrix before the first round is closed."


class ProcessView(Protocol):
    """Knowledge of the process that runs a federation, besides its ledger. Another thread reads it, so only plain reads."""

    activity: DeviceActivity
    feed: FaultFeed

    @property
    def address(self) -> str | None: ...

    @property
    def troubles(self) -> Sequence[str]: ...

    @property
    def standby(self) -> str:
        """Reason why the process waits before it serves; empty: it does not wait."""

    def reported(self, snapshot: Snapshot) -> Collection[str]:
        """Return the devices that have answered the open orders."""

    def stuck(self) -> str:
        """Return which step has made no progress for too long; empty if none."""

    def trouble(self) -> str:
        """Return why devices are not served now; empty if they are."""


class HomeWatch:
    """Facts of a home that are not in its ledger. The audit log is read again when it has grown."""

    def __init__(self, home: ServerHome) -> None:
        self._home, self._size, self._is_here = home, -1, home.storage_place() is None
        self._backup_at: float | None = None
        certificate = authority_certificate_in(home.authority)
        self._fingerprint = "" if certificate is None else short_form(certificate)

    def facts(self, snapshot: Snapshot) -> HomeFacts:
        """Return the present facts."""
        name, run = snapshot.settings.server.name, run_name(snapshot.run)
        free = shutil.disk_usage(self._home.path).free
        return HomeFacts(name, self._fingerprint, run, free, self._last_backup(), self._is_here)

    def _last_backup(self) -> float | None:
        log = self._home.path / AUDIT_FILE
        size = log.stat().st_size if log.exists() else 0
        if size != self._size:
            lines = log.read_bytes().splitlines() if size else []
            made = next((line for line in reversed(lines) if BACKUP_MADE.encode() in line), None)
            with suppress(msgspec.DecodeError):  # a damaged log is for `fedserver verify` to name
                entry = from_json(made, AuditEntry) if made else None
                if entry is not None and entry.event == BACKUP_MADE:
                    self._backup_at = datetime.fromisoformat(entry.at).timestamp()
            self._size = size
        return self._backup_at


class LedgerSource:
    """Source of a page: of a running federation, or of a home. One thread at a time uses it, never the federation's own.

    `look` and `attention` raise AttuneError where the facts cannot be read now.
    """

    def __init__(self, kind: Kind, storage: Storage, life: ProcessView, home: ServerHome | None = None) -> None:
        self._kind, self._reader, self._blobs, self._life = kind, storage.reader(), storage.blobs, life
        self._home = HomeWatch(home) if home else None
        self._condensed, self._alone = CondensedReports(), threading.Lock()

    def _snapshot(self) -> Snapshot:
        with self._alone:
            newest = self._reader.snapshot(self._condensed.newest)
            self._condensed.add(newest.rows)
            return replace(newest, rows=self._condensed.rows)

    def look(self) -> PageFacts:
        """Read the present facts."""
        snapshot, life = self._snapshot(), self._life
        status_object = status(snapshot, set(life.reported(snapshot)), life.address, life.troubles, standby=life.standby)
        return PageFacts(
            self._kind,
            status_object,
            self._condensed.lines,
            self._condensed.totals,
            snapshot.certificate_ends,
            life.activity.spans,
            tuple(life.feed.faults),
            dict(life.feed.totals),
            life.activity.round_s(),
            snapshot.record.opened_at,
            self._home.facts(snapshot) if self._home else HomeFacts(),
        )

    def attention(self, unit: str) -> AttentionMatrix:
        """Read the attention matrix of a component of the model; empty: the mean over components."""
        return read_again(lambda: self._attention(unit))

    def _attention(self, unit: str) -> AttentionMatrix:
        snapshot = self._snapshot()
        slot = next((slot for slot in snapshot.slots if slot.key == MATRICES), None)
        if slot is None:
            why = NO_ATTENTION.format(status(snapshot, set())["method"]) if snapshot.record.round else TOO_EARLY
            return AttentionMatrix((), (), (), "", why)
        with ArrayFile(self._blobs.open(blob_of(slot))) as file:
            names, matrices = read_matrices(file)
        if not matrices:
            return AttentionMatrix(names, (), (), "", f"the matrices of {len(names)} devices were too large to be stored")
        shown = unit if unit in matrices else next(iter(matrices))
        rows = [[round(value, 4) for value in row] for row in matrices[shown].tolist()]
        return AttentionMatrix(names, rows, list(matrices), shown)

    def stuck(self) -> str:
        return self._life.stuck()

    def trouble(self) -> str:
        return self._life.trouble()

    def close(self) -> None:
        with self._alone:
            self._reader.close()


KEPT = 200  # log entries for the page


class FaultFeed(logging.Handler):
    """Log handler that keeps the last warnings and errors; `totals` counts all of them, by level."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: deque[LoggedFault] = deque(maxlen=KEPT)
        self.totals: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        self.totals[level] += 1
        self.faults.append(LoggedFault(record.created, level, clean(record.getMessage())))


@contextmanager
def listening(logger: str = "fedserver") -> Iterator[FaultFeed]:
    """Collect the warnings and errors of a logger during the block."""
    feed = FaultFeed()
    logging.getLogger(logger).addHandler(feed)
    try:
        yield feed
    finally:
        logging.getLogger(logger).removeHandler(feed)


class WaitingServer:
    """ProcessView of a process that waits as a standby."""

    address: str | None = None
    troubles: Sequence[str] = ()

    def __init__(self, waits: str, feed: FaultFeed) -> None:
        self.standby, self.activity, self.feed = waits, DeviceActivity(time.time), feed

    def reported(self, snapshot: Snapshot) -> Collection[str]:
        return ()  # devices answer another server

    def stuck(self) -> str:
        return ""  # no step runs in this process

    def trouble(self) -> str:
        return f"standby: {self.standby}"


class RunningServer:
    """ProcessView of the coordinator in this process."""

    standby = ""

    def __init__(self, coordinator: Coordinator, address: str, feed: FaultFeed) -> None:
        self._coordinator, self.activity, self.address, self.feed = coordinator, coordinator.state.activity, address, feed

    @property
    def troubles(self) -> Sequence[str]:
        return self._coordinator.state.troubles.lines

    def reported(self, snapshot: Snapshot) -> Collection[str]:
        return self._coordinator.state.round.reported

    def stuck(self) -> str:
        limit_s = self._coordinator.state.settings.server.watchdog_s
        stuck_s = self._coordinator.stuck_s
        return f"a step has made no progress for {stuck_s:.0f} s" if limit_s and stuck_s >= limit_s else ""

    def trouble(self) -> str:
        if self._coordinator.error is not None:
            return f"failed: {self._coordinator.error}"
        return self.stuck() or "; ".join(self._coordinator.state.troubles.keeping_out())
