"""Refused callers and the reasons: a line in the log, a row in the ledger, a note on the device, a line in the audit log.

Refusals are cheap for the server: one entry per minute for each caller and kind, a bounded number per minute in all, and one
line of the audit log per hour. The reports of a device are bounded in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass

from attune.common.errors import AttuneError
from attune.common.text import clean
from attune.fedserver.core.advice import ORDINARY, advice
from attune.fedserver.ports.ledger import MemberLedger, Refusal

LOG = logging.getLogger("fedserver")
EVERY_S, AUDIT_EVERY_S = 60.0, 3600.0
MOST_A_MINUTE = 60  # entries; further callers are counted together, as OTHERS
KEPT = 200  # rows
OTHERS = "others"
MAX_NOTE = 500
LONGEST_SHOWN = 400  # characters of a reason: with what to do about it, a line


@dataclass
class _Seen:
    """Counter of one caller and kind: refusals since the last entry, and the time of that entry."""

    count: int = 0
    written_at: float = float("-inf")
    audited_at: float = float("-inf")


class Refusals:
    """Writer of refusals, with limits on how much it writes."""

    def __init__(self, ledger: MemberLedger) -> None:
        self._ledger = ledger
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._written: list[float] = []  # times of the last minute
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, error: AttuneError, who: str, device: str = "") -> None:
        """Write a refusal, unless honest devices cause it every day.

        Args:
            error: The error that the caller got.
            who: The caller, for people.
            device: The device whose certificate the caller showed.
        """
        if error.kind not in ORDINARY:
            self.tell(error.kind, str(error), who, device)

    def tell(self, kind: str, text: str, who: str, device: str = "") -> None:
        """Write a refusal in a task, without waiting. The device, if given, gets a note."""
        now = time.monotonic()
        self._written = [at for at in self._written if at > now - EVERY_S]
        if (who, kind) not in self._seen and len(self._written) >= MOST_A_MINUTE:
            who, device = OTHERS, ""
        seen = self._seen.setdefault((who, kind), _Seen())
        seen.count += 1
        if seen.written_at > now - EVERY_S:
            return
        self._written.append(now)
        count, seen.count, seen.written_at = seen.count, 0, now
        audited = seen.audited_at > now - AUDIT_EVERY_S
        seen.audited_at = seen.audited_at if audited else now
        self._forget(now)
        shown = clean(text, LONGEST_SHOWN)
        LOG.warning("%s was refused: %s (%s)", who, shown, advice(kind), extra={"device": device or None})
        task = asyncio.get_running_loop().create_task(
            self._write(Refusal(who, kind, shown, time.time(), count), device, audited)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, refusal: Refusal, device: str, audited: bool) -> None:
        with contextlib.suppress(AttuneError):  # if the ledger is busy, the log alone has the refusal
            await self._ledger.refuse(refusal, KEPT)
            known = await self._ledger.device(device) if device else None
            if known is not None and refusal.text not in known.note:
                await self._ledger.update_device(device, note=f"{refusal.text} - {advice(refusal.kind)}"[:MAX_NOTE])
            if not audited:
                facts = {"who": refusal.who, "kind": refusal.kind, "reason": refusal.text}
                await self._ledger.note("refused", "server", **facts)

    def _forget(self, now: float) -> None:
        """Drop old counters, so that memory is bounded."""
        if len(self._seen) > 2 * KEPT:
            self._seen = {key: seen for key, seen in self._seen.items() if seen.written_at > now - AUDIT_EVERY_S}


BYTES_A_MINUTE = 40_000  # of the reports of a device; two minutes meet in a moment, so a flood may get twice as many
LINE_BYTES = 240  # of a line beside the report itself
WINDOW_S = 60.0
LEFT_OUT = "%s reports more than %d bytes a minute: its further reports in this minute are counted, and not written"
COUNTED = "%s: %d reports were left out"


class ReportBudget:
    """Bytes that each device has reported in the present minute, and how many of its reports were left out."""

    def __init__(self) -> None:
        self._window_ends = float("-inf")
        self._bytes: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def allows(self, name: str, text: str, now: float) -> bool:
        """Count a report, and return whether it is written. A device above its budget gets two lines a minute.

        Args:
            name: The device.
            text: Its report.
            now: The present time (monotonic, seconds).
        """
        if now >= self._window_ends:
            for device, number in self._left_out.items():
                LOG.warning(COUNTED, device, number, extra={"device": device})
            self._window_ends, self._bytes, self._left_out = now + WINDOW_S, Counter(), Counter()
        self._bytes[name] += LINE_BYTES + len(text.encode())
        if self._bytes[name] <= BYTES_A_MINUTE:
            return True
        if not self._left_out[name]:
            LOG.warning(LEFT_OUT, name, BYTES_A_MINUTE, extra={"device": name})
        self._left_out[name] += 1
        return False
