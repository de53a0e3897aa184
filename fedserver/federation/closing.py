"""Closing of a round: the next state out of its updates, the commit after which it counts, and whether rounds end early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from attune.common.exchange.transform import SUMMED
from attune.common.faults import SERVER, fail_at
from attune.common.task import SCORED
from attune.fedserver.core.accuracy import summary
from attune.fedserver.core.buffered_rounds import staleness_weight
from attune.fedserver.core.messages import Aggregated, Effect, GoBack, Record, SummedChanges
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.policy import often_taken_back
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.core.round import step
from attune.fedserver.core.training_length import improves
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.opening import OrderSender, founders_in
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.steps import PassedOver
from attune.fedserver.ports.lab import RoundOutcome
from attune.fedserver.ports.ledger import Ledger

LOG = logging.getLogger("fedserver")
Follow = Callable[[Iterable[Effect]], Coroutine[Any, Any, bool]]


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
    """Aggregator of the updates in the inbox, and their commit. Closing a round again writes the same files."""

    def __init__(
        self, state: FederationState, orders: OrderSender, secure: SecureRounds, passed_over: PassedOver, follow: Follow
    ) -> None:
        """Take over the parts of a federation. `follow` carries out what the pure core decides."""
        self._state, self._orders, self._secure = state, orders, secure
        self._passed_over, self._follow = passed_over, follow
        self._since: float | None = None  # monotonic; while updates are aggregated

    @property
    def busy_s(self) -> float:
        """Seconds since the present aggregation, or its present exchange, began; 0 if there is none."""
        now = self._state.clock.monotonic()
        return 0.0 if self._since is None else now - max(self._since, self._secure.moved_at)

    async def close(self, number: int, cohort: frozenset[str], back: GoBack | None = None) -> None:
        """Aggregate, or go back, without a turn, so that devices come and go meanwhile. Commit in a turn.

        Args:
            number: The round.
            cohort: The devices whose updates count.
            back: Earlier state to which the federation goes back, instead of an aggregation.
        """
        state, self._since = self._state, self._state.clock.monotonic()
        state.book.withdraw(state.round.training)
        try:
            closing = await state.troubles.overcome(f"closing round {number}", partial(self._make, number, cohort, back))
        except Exception as error:
            await state.turns.step(state.turns.failed, error)
            return
        finally:
            self._since = None
        if not await state.turns.step(self._commit, closing):
            return  # the step has failed: what the cohort sent stays for the next try
        # Deleting takes time, so it is last, while the devices already work. A restart does it too.
        clear = partial(state.executors.disk, state.inbox.clear, number, state.round.record.kept_orders)
        await state.troubles.overcome("clearing the inbox", clear)
        fail_at(SERVER, number, "inbox-cleared")

    async def _commit(self, closing: ClosedRound) -> bool:
        """Commit a round: the new state, the record and the metrics become durable together. Return True."""
        state, settings, ledger = self._state, self._state.settings, self._state.storage.ledger
        done, before, trying = closing.outcome, state.round.record, f"committing round {closing.number}"
        ending = before.likeliest, before.last
        if settings.round.patience and not before.last and not closing.setback:
            ending = await state.troubles.overcome(trying, partial(likeliest_and_last, ledger, settings, before))
        event = Aggregated(state.clock.monotonic(), closing.setback, done.weight, closing.summed, *ending)
        taken = step(state.rules, state.round, event, state.clock.unix())
        record = taken.state.record
        commit = partial(ledger.commit_round, record, done.slots, closing.rows, closing.marks)
        await state.troubles.overcome(trying, commit)
        state.activity.close_round(closing.number)
        fail_at(SERVER, closing.number, "committed")
        state.round, state.saved = taken.state, record
        await state.lab.settle(sorted(taken.state.training))
        await state.lab.forget(record.oldest_kept)
        fail_at(SERVER, closing.number, "settled")
        number, rounds = closing.number, record.last or settings.round.rounds
        which = f"round {number}/{rounds}" if number <= rounds else f"newcomers' round {number}"
        LOG.info("%s closed: %s", which, summary(closing.rows, settings.method.evaluate, SCORED[state.task].metric))
        LOG.debug("round %d: %s", number, done.metrics)
        if closing.setback:
            LOG.warning("round %d counts for nothing: %s", number, closing.setback)
        state.troubles.show("taking the state back", often_taken_back(record, state.clock.unix()))
        await self._passed_over.bounded(number, done.bounded, done.without_vote)
        await self._follow(taken.effects)
        return True

    async def commit_evaluation(self, record: Record) -> None:
        """Commit what devices have answered to the evaluation after a round, if it is not committed already."""
        state, number = self._state, record.round
        overcome = partial(state.troubles.overcome, f"committing the evaluation after round {number}")
        entries = await overcome(partial(state.executors.disk, state.inbox.entries, "evaluate", number))
        if not entries:  # nobody answered, or it is committed already
            return
        rows = [entry.row for entry in entries.values()]
        known = await overcome(partial(self._orders.known, entries))
        marks = self._orders.fetched(record, known, entries, number, "evaluate")
        await overcome(partial(state.storage.ledger.commit_round, record, [], rows, marks))
        fail_at(SERVER, number, "evaluation-committed")
        await overcome(partial(state.executors.disk, state.inbox.clear_evaluation, number, list(entries)))
        LOG.info("state after round %d evaluated: %s", number, summary(rows, "served", SCORED[state.task].metric))

    async def _make(self, number: int, cohort: frozenset[str], back: GoBack | None) -> ClosedRound:
        """Aggregate the updates of a round, or go back. Errors are those of the lab, the inbox and the ledger."""
        round_, executors, lab = self._state.round, self._state.executors, self._state.lab
        total = None
        if self._secure.on and back is None:
            total = await self._secure.sum(self._state.run, round_.record, number, cohort)
        begun = round_.record.begun
        orders = [round_.record.order_of(name) for name in cohort if name in begun]
        accepted = await executors.disk(self._state.inbox.entries, "train", number, orders)
        entries = {name: entry for name, entry in accepted.items() if name in round_.reported}  # others are late
        if begun and back is None:
            entries = _aged(entries, round_.record, number, self._state.settings.round.staleness)
        rows = [entry.row for entry in entries.values()]
        known = await self._orders.known(accepted)
        marks = self._orders.fetched(round_.record, known, entries, number - 1, "train")
        for name in entries.keys() & begun.keys():
            marks[name] = {"fetched": begun[name] - 1}
        if back is not None:
            outcome = await lab.go_back(back.to)
            return ClosedRound(number, rows, marks, outcome, f"{back.why}{outcome.refused}")
        updates = {name: entry for name, entry in entries.items() if name in cohort}
        refused, unmasking = "", None
        if total is not None:
            updates = {name: entry for name, entry in accepted.items() if name in total.survivors}
            refused, unmasking = total.lacks({name: entry.attempt for name, entry in updates.items()}), total.unmasking
            updates = {} if refused else updates
        founders = founders_in(known, updates)
        adaptation = self._state.settings.adaptation if round_.record.adapting else None
        outcome = await lab.aggregate(updates, founders, adaptation, unmasking)
        summed = None
        if total is not None and outcome.above:
            means = ", ".join(f"{name} {outcome.metrics[name]:.3g}" for name in SUMMED if name in outcome.metrics)
            LOG.info("round %d: means over the devices of the sum, by their samples: %s", number, means or "none reported")
            summed = SummedChanges(number, len(total.survivors), outcome.above)
            LOG.info("%s", summed.told(self._secure.clip))
        refused = refused or outcome.refused
        if refused and total is not None and total.bound:
            outcome = await lab.another_start()  # else devices wait until the present one changes, which it need not
        for name in updates if not refused else ():
            marks.setdefault(name, {})["contributed"] = number
        return ClosedRound(number, rows, marks, outcome, refused, summed)


def _aged(entries: Mapping[str, AcceptedUpdate], record: Record, number: int, exponent: float) -> dict[str, AcceptedUpdate]:
    """Return the updates of a buffer in the order of arrival, with their staleness, as updates of round `number`."""
    aged = {}
    closing = [name for name in record.arrived if name in record.cohort and name in entries]
    for place, name in enumerate(closing, 1):
        stale = number - record.begun[name]
        row = msgspec.structs.replace(entries[name].row, round=number, staleness=stale, arrival=place)
        aged[name] = msgspec.structs.replace(entries[name], row=row, fresh=staleness_weight(stale, exponent))
    return aged


async def likeliest_and_last(ledger: Ledger, settings: ResolvedSettings, record: Record) -> tuple[int, int]:
    """Return the likeliest round so far, and the last round if the federation ends early (0: not decided).

    Both follow from rows that are durable, so they are the same after a restart. The last round is the one after that which is
    closed now: all devices evaluate both, as at every end.

    Args:
        ledger: The ledger.
        settings: The settings, with a patience.
        record: The record before the round that is closed now, in which no end is decided.
    """
    now, best = record.round, record.likeliest
    if now not in settings.train.scored_rounds or now >= settings.round.rounds - 1:
        return best, 0
    scores = await _scores(ledger, now)
    if not scores:
        LOG.warning("no device has told how likely held-out samples are after round %d: it cannot end the federation", now)
        return best, 0
    given_up = range(record.given_up_after + 1, record.given_up + 1)
    if not best or best in given_up or improves(scores, await _scores(ledger, best)):
        return now, 0
    if now - best < settings.round.patience:
        return best, 0
    LOG.info("held-out samples have not become likelier since round %d: round %d is the last one", best, now + 2)
    return best, now + 2


async def _scores(ledger: Ledger, number: int) -> Mapping[str, float]:
    """Return the likelihoods that devices have reported after a round, without revoked devices."""
    rows = await ledger.last_evaluations(number + 1)
    scored = {row.client: row.likelihood_kept for row in rows if row.round == number}
    return {name: nats for name, nats in scored.items() if nats is not None}
