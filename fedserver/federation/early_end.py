"""Decision whether a federation ends early, from the evaluations in its ledger (fedserver.core.patience)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from attune.fedserver.core.messages import Record
from attune.fedserver.core.patience import improves
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.ports.ledger import Ledger

LOG = logging.getLogger("fedserver")


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
