"""Opening and closing of a round: the orders of its devices, and the next state out of their updates.

A closed round waits beside the present state to be committed. The round that the last process left is taken up from the
ledger and the inbox.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from attune.common.exchange.messages import Order, WorkName
from attune.common.exchange.transform import SUMMED
from attune.common.methods.method import SOLVED
from attune.common.protocol import CLOSED_FORM, SUMS
from attune.common.task import TaskName
from attune.common.wire.blobs import Blob
from attune.fedserver.core.buffered_rounds import staleness_weight
from attune.fedserver.core.finishing import lengthened, stops_after, trial_round
from attune.fedserver.core.messages import GoBack, OrderId, Phase, Record, SummedChanges
from attune.fedserver.core.orderbook import OrderBook, counted, lacks_sums, needs_download
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.prior import NO_PRIOR, Prior, fitted_of, prior_of, votes_of
from attune.fedserver.core.records import AcceptedUpdate, DeviceRecord, Report, Smaller
from attune.fedserver.core.state import Round
from attune.fedserver.executors import Executors
from attune.fedserver.federation.device_activity import WORK, DeviceActivity, DeviceStage
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.streams import Streams
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import Lab, RoundOutcome, Served
from attune.fedserver.ports.ledger import Ledger, Snapshot
from attune.fedserver.stores.inbox import Inbox

LOG = logging.getLogger("fedserver")
HAS_ORDER = "has its order, and begins"


class OrderSender:
    """Writer of orders into the order book, and their sender."""

    def __init__(
        self,
        settings: ResolvedSettings,
        ledger: Ledger,
        streams: Streams,
        lab: Lab,
        blobs: Blobs,
        executors: Executors,
        activity: DeviceActivity,
        fewest: int,
    ) -> None:
        self.book, self._activity = OrderBook(), activity
        self._settings, self._ledger, self._streams, self._lab = settings, ledger, streams, lab
        self._blobs, self._executors = blobs, executors
        self._fewest = fewest  # votes of which a prior is made
        self._priors: dict[int, Prior] = {}  # of the evaluation after this round, once it was asked for
        self._stops: dict[int, tuple[int, ...]] = {}  # likewise: epochs of finishing

    async def open(
        self,
        task: TaskName,
        parts: Sequence[str],
        record: Record,
        left_s: float,
        work: WorkName,
        number: int,
        devices: Collection[str],
    ) -> None:
        """Send the orders of a step.

        Served values are made for all devices at once, so they have the same bits after a restart.

        Args:
            task: The federation's task.
            parts: The parts that devices hand in.
            record: The round's record.
            left_s: Seconds until the deadline.
            work: The kind of work.
            number: The round.
            devices: The devices that get an order.
        """
        known = await self._known({*record.devices, *devices})
        receivers = devices if record.begun else record.devices  # in buffered rounds the others have older values
        version = min(record.round, number - 1) if work == "train" else record.round  # of an order that is sent again
        earlier = version if version < record.round else None
        served = await self._lab.serve(sorted(receivers), _founders(known, receivers), earlier, work == "evaluate")
        cold_start = await self._lab.cold_start() if work == "evaluate" else {}
        prior = await self._prior(record, number) if work == "evaluate" else NO_PRIOR
        finish_stops = await self._finish_stops(number, task, record.last) if work == "evaluate" else ()
        LOG.info("round %d: %s on %d devices", number, work, len(devices))
        takes = {name: self._takes(served[name], record, known.get(name), work) for name in devices}
        smaller = await self._smaller(version, record, known, takes, cold_start)
        data: dict[str, bytes] = {}  # of small blobs, by digest
        for name in devices:
            if name in known and known[name].progress:
                await self._ledger.update_device(name, progress=0.0)
        for name in devices:
            blobs, stream = takes[name], self._streams.get(name)
            trains, returns = self._task_of(parts, record, name, known.get(name)) if work == "train" else ((), ())
            asked = {part: self._settings.encodings.asked(part, part in blobs) for part in returns if part != SOLVED}
            encodings = {part: encoding for part, encoding in asked.items() if encoding}
            order_id, changes = OrderId(work, number, name), stream is not None and stream.changes
            order = self.book.write(
                order_id,
                blobs,
                returns,
                left_s,
                version,
                cold_start,
                trains,
                encodings,
                smaller[name],
                changes,
                prior.of(name),
                self._stops_of(known.get(name), number, finish_stops, record.last),
                counted(record, known.get(name)),
            )
            inline = self._inline(name, order)
            for digest, blob in inline.items():
                if digest not in data:
                    data[digest] = await self._executors.disk(self._bytes, blob)
            if stream is not None:
                whole = all(ref.sent.digest in inline for ref in (*order.downloads, *order.cold_start))
                self._activity.enter(name, WORK[work] if whole else DeviceStage.WAITING, "" if whole else HAS_ORDER)
            self._streams.send(name, order.carrying({digest: data[digest] for digest in inline}))

    async def _finish_stops(self, number: int, task: TaskName, last: int) -> tuple[int, ...]:
        """Return the numbers of epochs for which devices fine-tune their models before the evaluation after round `number`.

        They are chosen once, by rows that change only when a device is revoked, so they are the same after a restart.
        """
        if number not in self._stops:
            train, rounds = self._settings.train, last or self._settings.round.rounds
            # The few held-out numbers of one device cannot show that a finished model is overfitted (docs/does-it-help.md).
            # With privacy likelihoods, which have no noise, choose nothing that the operator has not asked for.
            by_default = task == "regression" and self._settings.privacy.unit == "none"
            trial = trial_round(train, rounds, by_default)
            tried = await self._ledger.last_evaluations(number) if trial is not None and number >= rounds else []
            self._stops = {number: stops_after(train, rounds, trial, number, [row for row in tried if row.round == trial])}
        return self._stops[number]

    def _stops_of(self, device: DeviceRecord | None, number: int, stops: tuple[int, ...], last: int) -> tuple[int, ...]:
        """Return the stops of one device: in the last evaluation few samples take more epochs."""
        if number < (last or self._settings.round.rounds) or device is None or device.samples is None:
            return stops
        return lengthened(stops, self._settings.train, device.samples)

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
            prior = await self._executors.disk(lambda: prior_of(votes, fitted)) if enough else NO_PRIOR
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
        cold_start: Mapping[str, Blob],
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
            for name, blobs in (*takes.items(), ("", cold_start))
            for part, blob in blobs.items()
            if part in parts and not (blob.digest in changes and (name in holders or not name))
        }
        packed = {digest: Smaller(blob) for digest, blob in (await self._lab.pack(list(whole.values()))).items()}
        return {name: packed | (changes if name in holders else {}) for name in takes}

    def _holds(self, name: str, device: DeviceRecord | None, record: Record) -> bool:
        """Return whether a device should still have what it was served with this state or the one before."""
        stream = self._streams.get(name)
        takes_changes = stream is not None and stream.changes and not self.book.forgets(name)
        return takes_changes and device is not None and 0 <= record.round - 1 <= device.fetched

    def _inline(self, name: str, order: Order) -> dict[str, Blob]:
        """Return the blobs that fit into the order itself, by digest, if the device accepts them there."""
        stream = self._streams.get(name)
        room = 0 if stream is None else min(stream.inline_bytes, self._settings.server.inline_bytes)
        inline: dict[str, Blob] = {}
        for ref in (reference.sent for reference in (*order.downloads, *order.cold_start)):
            if ref.digest not in inline and ref.size <= room:
                inline[ref.digest] = self.book.offered(name, ref.digest)
                room -= ref.size
        return inline

    def _bytes(self, blob: Blob) -> bytes:
        with contextlib.closing(self._blobs.open(blob)) as source:
            return source.read(0, blob.size)

    async def founders(self, names: Iterable[str]) -> list[str]:
        """Return which of these devices enrolled before the first round was closed."""
        asked = list(names)
        return _founders(await self._known(asked), asked)

    async def fetched(self, record: Record, names: Iterable[str], state_round: int, work: str) -> dict[str, dict[str, int]]:
        """Return marks for those devices that were served the state after `state_round`."""
        asked = list(names)
        known = await self._known(asked)
        return {name: {"fetched": state_round} for name in asked if self._needs_download(record, known.get(name), work)}

    async def _known(self, names: Collection[str]) -> dict[str, DeviceRecord]:
        return {device.name: device for device in await self._ledger.devices(names)}

    def _task_of(
        self, parts: Sequence[str], record: Record, name: str, device: DeviceRecord | None
    ) -> tuple[Sequence[str], ...]:
        """Return the kinds of tensors that a device trains (empty: all) and the parts that it hands in."""
        adaptation = self._settings.adaptation
        if record.adapting and adaptation is not None:
            return adaptation.trains, [part for part in parts if part in adaptation.returns]
        asked = parts if name in record.cohort or name in record.begun else ()
        adds_up = self._streams.can(name, SUMS) and lacks_sums(record, device)
        return (), [part for part in asked if part != SOLVED or adds_up]

    def _takes(self, served: Mapping[str, Blob], record: Record, device: DeviceRecord | None, work: str) -> dict[str, Blob]:
        """Return what a device downloads for an order."""
        needed, knows = self._needs_download(record, device, work), device and self._streams.can(device.name, CLOSED_FORM)
        return {part: blob for part, blob in served.items() if (knows if part == SOLVED else needed)}

    def _needs_download(self, record: Record, device: DeviceRecord | None, work: str) -> bool:
        # What newcomers leave as it is must be the federation's, not what a device that was never sampled made of it.
        train = "sampled" if record.adapting else self._settings.round.train
        return needs_download(device, work, train, self._settings.method.evaluate)


def _founders(known: Mapping[str, DeviceRecord], names: Iterable[str]) -> list[str]:
    return [name for name in names if name in known and known[name].founder]


@dataclass(frozen=True)
class ClosedRound:
    """Result of a round, before it is committed."""

    number: int
    rows: Sequence[Report]
    marks: Mapping[str, Mapping[str, int]]
    outcome: RoundOutcome
    setback: str = ""  # why its updates make no state
    summed: SummedChanges | None = None  # under secure aggregation


class RoundCloser:
    """Aggregator of the updates in the inbox. Closing a round again writes the same files."""

    def __init__(
        self,
        settings: ResolvedSettings,
        inbox: Inbox,
        lab: Lab,
        orders: OrderSender,
        executors: Executors,
        secure: SecureRounds,
    ) -> None:
        self._adaptation, self._inbox, self._lab = settings.adaptation, inbox, lab
        self._staleness, self._clip = settings.round.staleness, settings.privacy.secure_clip
        self._orders, self._executors, self._secure = orders, executors, secure

    async def make(self, state: Round, number: int, cohort: frozenset[str], back: GoBack | None, run: str) -> ClosedRound:
        """Aggregate the updates of a round.

        Args:
            state: The round.
            number: Its number.
            cohort: The devices whose updates count.
            back: Earlier state to which the federation goes back, instead of an aggregation.
            run: The name of the run.

        Raises:
            AttuneError: As in the lab, the inbox and the ledger.
        """
        total = None
        if self._secure.on and back is None:
            total = await self._secure.sum(run, state.record, number, cohort)
        begun = state.record.begun
        orders = [state.record.order_of(name) for name in cohort if name in begun]
        accepted = await self._executors.disk(self._inbox.entries, "train", number, orders)
        entries = {name: entry for name, entry in accepted.items() if name in state.reported}  # others are late
        if begun and back is None:
            entries = self._aged(entries, state.record, number)
        rows = [entry.row for entry in entries.values()]
        marks = await self._orders.fetched(state.record, entries, number - 1, "train")
        for name in entries.keys() & begun.keys():
            marks[name] = {"fetched": begun[name] - 1}
        if back is not None:
            outcome = await self._lab.go_back(back.to)
            return ClosedRound(number, rows, marks, outcome, f"{back.why}{outcome.refused}")
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        refused, unmasking = "", None
        if total is not None:
            updates = {name: entry for name, entry in accepted.items() if name in total.survivors}
            refused, unmasking = total.lacks({name: entry.attempt for name, entry in updates.items()}), total.unmasking
            updates = {} if refused else updates
        founders = await self._orders.founders(updates)
        adaptation = self._adaptation if state.record.adapting else None
        outcome = await self._lab.aggregate(updates, founders, adaptation, unmasking)
        summed = None
        if total is not None and outcome.above:
            means = ", ".join(f"{name} {outcome.metrics[name]:.3g}" for name in SUMMED if name in outcome.metrics)
            LOG.info("round %d: means over the devices of the sum, by their samples: %s", number, means or "none reported")
            summed = SummedChanges(number, len(total.survivors), outcome.above)
            LOG.info("%s", summed.told(self._clip))
        refused = refused or outcome.refused
        if refused and total is not None and total.bound:
            outcome = await self._lab.another_start()  # else devices wait until the present one changes, which it need not
        for name in updates if not refused else ():
            marks.setdefault(name, {})["contributed"] = number
        return ClosedRound(number, rows, marks, outcome, refused, summed)

    def _aged(self, entries: Mapping[str, AcceptedUpdate], record: Record, number: int) -> dict[str, AcceptedUpdate]:
        """Return the updates of a buffer in the order of arrival, with their staleness, as updates of this round."""
        aged = {}
        closing = [name for name in record.arrived if name in record.cohort and name in entries]
        for place, name in enumerate(closing, 1):
            stale = number - record.begun[name]
            row = msgspec.structs.replace(entries[name].row, round=number, staleness=stale, arrival=place)
            aged[name] = msgspec.structs.replace(entries[name], row=row, fresh=staleness_weight(stale, self._staleness))
        return aged


async def taken_up(snapshot: Snapshot, rules: Rules, inbox: Inbox, executors: Executors) -> Round:
    """Return the round of a snapshot with what was reported to it. Entries of the inbox for no open order are removed."""
    record = snapshot.record
    await executors.disk(inbox.clear_except, *record.open_orders, record.round, record.kept_orders)
    handed_in = await executors.disk(inbox.names, *record.open_orders)
    reported = await _reported(snapshot, inbox, executors)
    if record.begun:
        orders = [OrderId("train", number, name) for name, number in record.begun.items()]
        buffered = await executors.disk(inbox.entries, "train", record.round + 1, orders)
        buffered = {name: entry for name, entry in buffered.items() if name in record.begun}
        handed_in |= set(record.arrived)
        reported |= {name: entry.row for name, entry in buffered.items()}
        here = [name for name in record.arrived if name in buffered]  # then those whose receipt did not go out any more
        record = msgspec.structs.replace(record, arrived=(*here, *sorted(buffered.keys() - set(here))))
    losses = {name: row.loss for name, row in reported.items() if row.work == "train" and row.loss is not None}
    return Round.of(_reopened(record, handed_in - reported.keys()), reported, _finished(snapshot, rules), losses)


async def _reported(snapshot: Snapshot, inbox: Inbox, executors: Executors) -> dict[str, Report]:
    """Return the reports on the open orders: from the inbox, or after the end from the evaluation that was committed."""
    record = snapshot.record
    if record.revive().phase is Phase.DONE:
        return {row.client: row for row in snapshot.rows if (row.work, row.round) == ("evaluate", record.round)}
    entries = await executors.disk(inbox.entries, *record.open_orders)
    return {name: entry.row for name, entry in entries.items()}


def _reopened(record: Record, damaged: AbstractSet[str]) -> Record:
    """Open a round again that was about to be closed, if one of its updates is damaged.

    The device sends the update once more, and the state gets the same bits as without the damage.
    """
    if damaged and record.revive().phase is Phase.AGGREGATING and record.fixed is None:
        return msgspec.structs.replace(record.revive(), phase=Phase.TRAINING)
    return record


def _finished(snapshot: Snapshot, rules: Rules) -> set[str]:
    """Return the devices that have evaluated the end.

    If adaptations change what all devices are served, the latest adaptation counts as the end.
    """
    rounds = snapshot.record.last or rules.settings.rounds
    first = max(snapshot.record.round, rounds) if rules.common else rounds
    return {row.client for row in snapshot.rows if row.work == "evaluate" and row.round >= first}
