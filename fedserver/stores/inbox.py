"""Accepted updates: a blob for each part, and last an entry that makes the update count: all of it or nothing.

The updates of the last closed round are kept until the next is closed. If a file of the state that was made of them is damaged,
it can be made again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import msgspec

from attune.common.errors import HomeMismatch
from attune.common.faults import SERVER, fail_at
from attune.common.metrics import within_bounds
from attune.common.text import from_json
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import check_of
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.ports.blobs import INBOX, STATE, Blobs, Damaged, is_later

LOG = logging.getLogger("fedserver")
ENTRY = "update.json"


class Inbox:
    """The accepted updates of one federation."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._closed = 0  # the last round of training whose updates are in the state

    def accept(
        self, order: OrderId, row: Report, parts: Mapping[str, Blob], facts: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Keep the parts, and make the whole durable. Accepting twice keeps the first.

        Raises:
            DiskFull: There is no space; nothing is kept.
            Damaged: A part is missing.
        """
        if self.holds(order):
            return
        kept: dict[str, Blob] = {}
        try:
            for part, blob in parts.items():
                kept[part] = self._blobs.keep(blob, f"{INBOX}{order}/{part}.safetensors")
            fail_at(SERVER, order.round, "inbox-renamed")
            self._put(_entry_name(order), AcceptedUpdate(row, kept, facts or {}))
        except BaseException:
            self._blobs.remove([blob.name for blob in kept.values()])
            raise
        fail_at(SERVER, order.round, "update-accepted")

    def accept_masked(self, order: OrderId, attempt: int, parts: Mapping[str, Blob]) -> None:
        """Keep the masked parts of an update whose report was accepted, in place of those of an earlier attempt.

        Raises:
            DiskFull: There is no space; nothing changes.
            Damaged: The report or a part is missing.
        """
        entry = self._entry(_entry_name(order))
        kept = {part: self._blobs.keep(blob, f"{INBOX}{order}/{part}.{attempt}.safetensors") for part, blob in parts.items()}
        row = entry.row
        if attempt != entry.attempt:  # a device that did not get the receipt hands the same in again
            row = msgspec.structs.replace(row, bytes_up=(row.bytes_up or 0) + sum(blob.size for blob in parts.values()))
        self._put(_entry_name(order), msgspec.structs.replace(entry, row=row, parts=kept, attempt=attempt))
        names = {blob.name for blob in kept.values()}
        self._blobs.remove([blob.name for blob in entry.parts.values() if blob.name not in names])
        fail_at(SERVER, order.round, "masked-accepted")

    def holds(self, order: OrderId) -> bool:
        """Return whether an update for this order was accepted."""
        return bool(self._blobs.names(_entry_name(order)))

    def entries(self, work: str, round_: int, earlier: Iterable[OrderId] = ()) -> dict[str, AcceptedUpdate]:
        """Return the accepted updates of one round, by device, in the order of names.

        A damaged one is removed, with a line in the log: its device still has it and is asked for it again.

        Args:
            work: Of the orders.
            round_: Their round.
            earlier: Further orders, of earlier rounds.
        """
        accepted: dict[str, AcceptedUpdate] = {}
        others = {_entry_name(order) for order in earlier if self.holds(order)}
        for name in sorted({*self._names(f"{work}-{round_}-"), *others}):
            try:
                entry = self._entry(name)
                for blob in entry.parts.values():
                    self._blobs.open(blob).close()
            except Damaged as damaged:
                LOG.warning("%s; that update is thrown away, its device is asked to send it again", damaged)
                self._discard([name])
            else:
                accepted[entry.row.client] = entry
        return dict(sorted(accepted.items()))

    def names(self, work: str, round_: int) -> set[str]:
        """Return the devices with an update of this round, damaged or not."""
        prefix = f"{INBOX}{work}-{round_}-"
        return {name.removeprefix(prefix).removesuffix(f"/{ENTRY}") for name in self._names(f"{work}-{round_}-")}

    def damaged(self) -> list[str]:
        """Return a line for each file of an accepted update whose bytes are not those that were sent."""
        lines = []
        for name in self._names(""):
            try:
                for blob in self._entry(name).parts.values():
                    self._blobs.check(blob)
            except Damaged as damaged:
                lines.append(str(damaged))
        return lines

    def discard(self, order: OrderId) -> None:
        """Remove an update that turned out to be late. Updates that are in the state stay."""
        if order.work != "train" or order.round > self._closed:
            self._discard([_entry_name(order)])

    def clear(self, round_: int, kept: Collection[OrderId] = ()) -> None:
        """Remove the updates of the rounds before this one, after the commit that consumed this round of training.

        Devices may have answered the next orders already, and others do so meanwhile. `kept`: further orders to keep.
        """
        self._closed = round_
        self._keep_only(f"train-{round_}-", f"evaluate-{round_}-", f"train-{round_ + 1}-", *(f"{order}/" for order in kept))

    def clear_evaluation(self, round_: int, clients: Iterable[str]) -> None:
        """Remove the evaluations of these devices, after their commit. Those that came since then stay."""
        self._discard([_entry_name(OrderId("evaluate", round_, client)) for client in clients])

    def clear_except(self, work: str, round_: int, closed: int, kept: Collection[OrderId] = ()) -> None:
        """Remove what a killed process left unfinished, or had no time to clear, at start.

        Args:
            work: Work of the open orders: train or evaluate.
            round_: Round of the open orders.
            closed: The last closed round.
            kept: Further orders to keep.
        """
        self._closed = closed
        entries = set(self._names(""))
        loose = [name for name in self._blobs.names(INBOX) if f"{name.rpartition('/')[0]}/{ENTRY}" not in entries]
        self._blobs.remove(loose)
        self._keep_only(f"{work}-{round_}-", f"train-{closed}-", *(f"{order}/" for order in kept))

    def _keep_only(self, *prefixes: str) -> None:
        """Remove all other updates. They are listed once: an update that is accepted after that stays."""
        kept = tuple(f"{INBOX}{prefix}" for prefix in prefixes)
        self._discard([name for name in self._names("") if not name.startswith(kept)])

    def _put(self, name: str, entry: AcceptedUpdate) -> None:
        bare = msgspec.json.encode(msgspec.structs.replace(entry, check=""))
        self._blobs.put(name, msgspec.json.encode(msgspec.structs.replace(entry, check=check_of(bare))))

    def _entry(self, name: str) -> AcceptedUpdate:
        try:
            text = self._blobs.get(name)
            entry = from_json(text, AcceptedUpdate)
            if entry.check and entry.check != check_of(text):
                raise Damaged(f"{name} is damaged (its text is not what was written)")
            return msgspec.structs.replace(entry, row=within_bounds(entry.row))
        except (KeyError, msgspec.DecodeError) as error:
            raise Damaged(f"{name} is damaged ({error})") from None

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self._blobs.names(f"{INBOX}{prefix}") if name.endswith(f"/{ENTRY}")]

    def _discard(self, names: list[str]) -> None:
        """Remove updates, the entries first: without them the rest does not count."""
        rest = [other for name in names for other in self._blobs.names(name.removesuffix(ENTRY)) if other != name]
        self._blobs.remove([*names, *rest])


def _entry_name(order: OrderId) -> str:
    return f"{INBOX}{order}/{ENTRY}"


def check_age(blobs: Blobs, closed: int) -> None:
    """Check that ledger and blobs are of one time: under an older ledger, newer state would go as the remains of a crash.

    Args:
        blobs: The blobs. A killed server leaves those of one more round at most.
        closed: Rounds that the ledger counts.

    Raises:
        HomeMismatch: There are blobs of later rounds; nothing is changed.
    """
    for name in (*blobs.names(STATE), *blobs.names(INBOX)):
        if is_later(name, closed):
            raise HomeMismatch(
                f"the database (state.sqlite) counts {closed} closed rounds, but {name} is of a later one: the database is "
                "damaged, or an old copy. Restore it, or the whole home from one backup; nothing was changed"
            )
