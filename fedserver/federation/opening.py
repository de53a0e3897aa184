"""Opening of a round: the orders of its devices, what they are served, and their way down the streams."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from attune.common.exchange.messages import Order, WorkName
from attune.common.methods.method import SOLVED
from attune.common.protocol import CLOSED_FORM, EXACT_SUMS, IN_NO_SUM, SUMS
from attune.common.wire.blobs import Blob, all_bytes
from attune.fedserver.core.messages import OrderId, Record
from attune.fedserver.core.orderbook import counted, lacks_sums, needs_download
from attune.fedserver.core.planning import sums_ability
from attune.fedserver.core.prior import NO_PRIOR, Prior, fitted_of, prior_of, votes_of
from attune.fedserver.core.records import DeviceRecord, Smaller
from attune.fedserver.core.round import left_s
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.streams import WORK, DeviceStage
from attune.fedserver.ports.lab import Served

LOG = logging.getLogger("fedserver")
HAS_ORDER = "has its order, and begins"
Known = Mapping[str, DeviceRecord]


class OrderSender:
    """Writer of orders into the order book, and their sender."""

    def __init__(self, state: FederationState, fewest: int) -> None:
        self._state, self._fewest = state, fewest  # fewest: votes of which a prior is made
        self._settings, self._ledger, self._lab, self._book = state.settings, state.storage.ledger, state.lab, state.book
        self._in_one_sum = sums_ability(state.settings) == IN_NO_SUM  # samples are, behind masks
        self._priors: dict[int, Prior] = {}  # of the evaluation after this round, once it was asked for

    async def open(self, work: WorkName, number: int, devices: Collection[str]) -> None:
        """Send these devices their orders for a step of round `number`. Errors that can pass are overcome."""
        state = self._state
        # If the clock stands, devices work one after the other and none is late. 0 means no deadline.
        span_s = 0.0 if state.clock.stands else left_s(state.rules, state.round, state.clock.monotonic())
        await state.troubles.overcome(f"opening round {number}", partial(self._send, span_s, work, number, devices))

    async def _send(self, span_s: float, work: WorkName, number: int, devices: Collection[str]) -> None:
        """Make and send orders. Served values are made for all devices at once, so they have the same bits after a restart."""
        record, parts = self._state.round.record, sorted(self._state.max_bytes)
        known = await self.known({*record.devices, *devices})
        version = min(record.round, number - 1) if work == "train" else record.round  # of an order that is sent again
        earlier = version if version < record.round else None
        together = self._state.round.receivers(devices)
        served = await self._lab.serve(sorted(together), founders_in(known, together), earlier, work == "evaluate")
        cold_start: Served = await self._lab.cold_start(sorted(devices)) if work == "evaluate" else {}
        prior = await self._prior(record, number) if work == "evaluate" else NO_PRIOR
        LOG.info("round %d: %s on %d devices", number, work, len(devices))
        takes = {name: self._takes(served[name], record, known.get(name), work) for name in devices}
        smaller = await self._smaller(version, record, known, takes, cold_start)
        data: dict[str, bytes] = {}  # of small blobs, by digest
        for name in devices:
            if name in known and known[name].progress:
                await self._ledger.update_device(name, progress=0.0)
        for name in devices:
            blobs, stream = takes[name], self._state.streams.get(name)
            theirs = [part for part in parts if part == SOLVED or part in served[name]]  # a light device has no network
            trains, returns = self._task_of(theirs, record, name, known.get(name)) if work == "train" else ((), ())
            encoding_of = self._settings.encodings.asked
            asked = {part: "" if part == SOLVED else encoding_of(part, part in blobs) for part in returns}
            order_id, changes = OrderId(work, number, name), stream is not None and stream.changes
            order = self._book.write(
                order_id, blobs, asked, span_s, version, cold_start.get(name), trains, smaller[name], changes, prior.of(name),
                counted(record, known.get(name)),
            )  # fmt: skip
            inline = self._inline(name, order)
            for digest, blob in inline.items():
                if digest not in data:
                    data[digest] = await self._state.executors.disk(self._bytes, blob)
            if stream is not None:
                whole = inline.keys() >= {ref.sent.digest for ref in (*order.downloads, *order.cold_start)}
                self._state.activity.enter(name, WORK[work] if whole else DeviceStage.WAITING, "" if whole else HAS_ORDER)
            self._state.streams.send(name, order.carrying({digest: data[digest] for digest in inline}))

    async def _prior(self, record: Record, number: int) -> Prior:
        """Return what devices found before this evaluation. It is read once.

        From fewer than `fewest` devices it is empty, unless all of them disclose statistics: those report a constant answer.

        Its rows change only when a device is revoked, so the prior is the same after a restart.
        """
        if self._settings.privacy.unit != "none":  # votes have no noise: a device shows them the server at most, not the others
            return NO_PRIOR
        if number not in self._priors:
            rows = await self._ledger.last_evaluations(number, range(record.given_up_after + 1, record.given_up + 1))
            votes, fitted = votes_of(rows), fitted_of(rows)
            disclosed = all(row.accuracy_constant is not None for row in rows if row.client in votes)
            enough = disclosed or len(votes) >= self._fewest
            prior = await self._state.executors.disk(lambda: prior_of(votes, fitted)) if enough else NO_PRIOR
            self._priors = {number: prior}
        return self._priors[number]

    def count_votes_anew(self) -> None:
        """Forget the priors, because a device that voted was revoked."""
        self._priors.clear()

    async def _smaller(
        self,
        version: int,
        record: Record,
        known: Mapping[str, DeviceRecord],
        takes: Served,
        cold_start: Served,
    ) -> dict[str, dict[str, Smaller]]:
        """Return for each device the smaller form of each blob that it takes, by digest.

        It is the delta if the device seems to have the older value, and the present state is served; else the compressed value.
        """
        parts = self._settings.encodings.packed
        if not parts:
            return {name: {} for name in takes}
        present = version == record.round
        holders = [name for name in takes if present and takes[name] and self._holds(name, known.get(name), record)]
        changes = await self._lab.changes(holders, parts)
        whole = {
            blob.digest: blob
            for name, blobs in (*takes.items(), *(("", common) for common in cold_start.values()))
            for part, blob in blobs.items()
            if part in parts and not (blob.digest in changes and (name in holders or not name))
        }
        packed = {digest: Smaller(blob) for digest, blob in (await self._lab.pack(list(whole.values()))).items()}
        return {name: packed | (changes if name in holders else {}) for name in takes}

    def _holds(self, name: str, device: DeviceRecord | None, record: Record) -> bool:
        """Return whether a device should still have what it was served with this state or the one before."""
        stream = self._state.streams.get(name)
        takes_changes = stream is not None and stream.changes and not self._book.forgets(name)
        return takes_changes and device is not None and 0 <= record.round - 1 <= device.fetched

    def _inline(self, name: str, order: Order) -> dict[str, Blob]:
        """Return the blobs that fit into the order itself, by digest, if the device accepts them there."""
        stream = self._state.streams.get(name)
        room = 0 if stream is None else min(stream.inline_bytes, self._settings.server.inline_bytes)
        inline: dict[str, Blob] = {}
        for reference in (*order.downloads, *order.cold_start):
            ref = reference.sent
            if ref.digest not in inline and ref.size <= room:
                inline[ref.digest] = self._book.offered(name, ref.digest)
                room -= ref.size
        return inline

    def _bytes(self, blob: Blob) -> bytes:
        return all_bytes(self._state.storage.blobs.open(blob))

    def fetched(self, record: Record, known: Known, names: Iterable[str], number: int, work: str) -> dict[str, dict[str, int]]:
        """Return marks for those devices that were served the state after round `number`."""
        return {name: {"fetched": number} for name in names if self._needs_download(record, known.get(name), work)}

    async def known(self, names: Collection[str]) -> Known:
        """Return what the ledger has of these devices, by name."""
        return {device.name: device for device in await self._ledger.devices(names)}

    def _task_of(
        self, parts: Sequence[str], record: Record, name: str, device: DeviceRecord | None
    ) -> tuple[Sequence[str], ...]:
        """Return the kinds of tensors that a device trains (empty: all) and the parts that it hands in."""
        adaptation = self._settings.adaptation
        if record.adapting and adaptation is not None:
            return adaptation.trains, [part for part in parts if part in adaptation.returns]
        asked = parts if self._state.round.hands_in(name) else ()
        in_plain = self._state.streams.can(name, SUMS) and lacks_sums(record, device)
        adds_up = not record.round if self._in_one_sum else in_plain  # behind masks the whole cohort of the first round
        return (), [part for part in asked if part != SOLVED or adds_up]

    def _takes(self, served: Mapping[str, Blob], record: Record, device: DeviceRecord | None, work: str) -> dict[str, Blob]:
        """Return what a device downloads for an order."""
        needed = self._needs_download(record, device, work)
        ability = EXACT_SUMS if self._in_one_sum else CLOSED_FORM
        knows = device and self._state.streams.can(device.name, ability)
        return {part: blob for part, blob in served.items() if (knows if part == SOLVED else needed)}

    def _needs_download(self, record: Record, device: DeviceRecord | None, work: str) -> bool:
        # What newcomers leave as it is must be the federation's, not what a device that was never sampled made of it.
        train = "sampled" if record.adapting else self._settings.round.train
        return needs_download(device, work, train, self._settings.method.evaluate)


def founders_in(known: Known, names: Iterable[str]) -> list[str]:
    """Return which of these devices enrolled before the first round was closed."""
    return [name for name in names if name in known and known[name].founder]
