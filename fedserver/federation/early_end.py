"""Decision whether a federation ends early, from the evaluations in its ledger (fedserver.core.patience)."""

from __future__ import annotations

import logging

from attune.fedserver.core.messages import Aggregated, Record
from attune.fedserver.core.patience import improves
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.racing import DeviceScores
from attune.fedserver.federation.rounds import ClosedRound
from attune.fedserver.ports.ledger import Ledger

LOG = logging.getLogger("fedserver")


async def aggregated(
    ledger: Ledger, settings: ResolvedSettings, record: Record, closing: ClosedRound, now: float
) -> Aggregated:
    """Return the event that a round is closed, and whether the federation ends early.

    Args:
        ledger: The ledger.
        settings: The settings.
        record: The record before.
        closing: The round.
        now: As in the event.
    """
    ending = record.likeliest, record.last
    if settings.round.patience and not record.last and not closing.setback:
        ending = await _likeliest_and_last(ledger, settings, record)
    return Aggregated(now, closing.setback, closing.outcome.weight, closing.summed, *ending)


async def _likeliest_and_last(ledger: Ledger, settings: ResolvedSettings, record: Record) -> tuple[int, int]:
    """Return the likeliest round so far, and the last round if the federation ends early (0: not decided).

    Both follow from rows that are durable, so they are the same after a restart. The last round is the one after that which is
    closed now: all devices evaluate both, as at every end.
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


async def _scores(ledger: Ledger, number: int) -> DeviceScores:
    """Return the likelihoods that devices have reported after a round, without revoked devices."""
    rows = await ledger.last_evaluations(number + 1)
    scored = {row.client: row.likelihood_kept for row in rows if row.round == number}
    return {name: nats for name, nats in scored.items() if nats is not None}
