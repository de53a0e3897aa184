"""Early end of a federation from the evaluations in its ledger: sequences of likelihoods by hand, restarts, and liars."""

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from attune.common import aio
from attune.common.errors import LedgerBusy
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import Report
from attune.fedserver.federation.closing import likeliest_and_last
from attune.fedserver.federation.steps import PassedOver, Troubles, Turns
from attune.simulation.memory import MemoryLedger

Scores = Mapping[str, float]
HONEST = tuple(f"d{n}" for n in range(8))


def ended(scores: Callable[[int], Scores], restarts: bool = False, **rounds: Any) -> Record:
    """Close rounds until the last one. After every fifth round devices report `scores`. Return the record at the end."""

    async def run() -> Record:
        settings = resolve({"round": {"rounds": "auto", **rounds}})
        ledger, record = MemoryLedger(), Record()
        while record.round < (record.last or settings.round.rounds):
            decided = (
                {await likeliest_and_last(ledger, settings, record) for _ in range(1 + restarts)} if not record.last else None
            )
            likeliest, last = decided.pop() if decided else (record.likeliest, record.last)
            assert not decided, "a restart decides the same"
            record = msgspec.structs.replace(record, round=record.round + 1, likeliest=likeliest, last=last)
            of = scores(record.round) if record.round in settings.train.scored_rounds else {}
            rows = [report(record.round, name, nats) for name, nats in of.items()]
            await ledger.commit_round(record, [], rows, {})
        return record

    return aio.run(run())


def report(number: int, name: str, nats: float) -> Report:
    return Report(round=number, work="evaluate", client=name, likelihood_kept=nats)


def alike(of: Callable[[int], float]) -> Callable[[int], Scores]:
    return lambda number: dict.fromkeys(HONEST, of(number))


def test_a_sequence_by_hand() -> None:
    """It is likeliest after round 10. After 20, ten rounds have brought no gain: 21 is under way, and 22 is the last."""
    nats = {5: -10.0, 10: -8.0, 15: -8.5, 20: -8.1}
    record = ended(alike(lambda number: nats[number]), restarts=True)
    assert (record.likeliest, record.last, record.round) == (10, 22, 22)


def test_a_gain_within_the_patience_begins_it_anew() -> None:
    nats = {5: -10.0, 10: -8.0, 15: -8.5, 20: -7.9, 25: -9.0, 30: -9.0}
    record = ended(alike(lambda number: nats[number]))
    assert (record.likeliest, record.last) == (20, 32)


def test_gains_without_end_end_at_the_maximum() -> None:
    record = ended(alike(float), rounds=43, patience=5)
    assert (record.likeliest, record.last, record.round) == (40, 0, 43)


def test_nobody_who_tells_scores_ends_nothing_early(caplog: pytest.LogCaptureFixture) -> None:
    assert ended(lambda number: {}, rounds=23, patience=5).round == 23
    assert "no device has told how likely held-out samples are after round 5" in caplog.text


@pytest.mark.parametrize(
    "lie", [lambda number: -1e6 * number, lambda number: 1e6 * number, lambda number: 1e9 * (-1) ** number]
)
def test_a_liar_neither_ends_the_federation_at_once_nor_keeps_it_going(lie: Callable[[int], float]) -> None:
    """Honest devices gain until round 30, and lose then. What a liar says moves nothing."""

    def scores(number: int) -> Scores:
        return {**dict.fromkeys(HONEST, -float(abs(30 - number)) - 1.0), "liar": lie(number)}

    record = ended(scores, restarts=True)
    assert (record.likeliest, record.last) == (30, 42)


def test_states_that_were_taken_back_are_not_compared_with() -> None:
    async def run() -> tuple[int, int]:
        settings, ledger = resolve({"round": {"rounds": "auto"}}), MemoryLedger()
        rows = [report(5, name, -1.0) for name in HONEST]
        rows += [report(20, name, -9.0) for name in HONEST]
        record = Record(round=20, likeliest=5, given_up=6, back_to=4)
        await ledger.commit_round(record, [], rows, {})
        return await likeliest_and_last(ledger, settings, record)

    assert aio.run(run()) == (20, 0)


# --- work whose caller is gone: what it ends with is no noise in the log


async def test_a_lost_database_after_the_caller_is_gone_is_no_noise() -> None:
    """Repeat seed 15 of `make chaos-scale`: a device hung up while its update waited for the database."""
    noise: list[dict[str, Any]] = []

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    turns, lost = Turns(), asyncio.Event()

    async def work() -> None:
        await lost.wait()
        raise LedgerBusy("the database cannot be used now")

    caller = asyncio.create_task(turns.carry(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    lost.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert noise == []


# --- messages to the operator about devices whose changes are bounded


async def test_a_device_is_warned_of_once_and_then_told_among_others(caplog: pytest.LogCaptureFixture) -> None:
    """Honest devices with unlike data pass the bound in most rounds: 800 rounds must not be 800 warnings."""
    standing = PassedOver(MemoryLedger(), Troubles())
    caplog.set_level(logging.INFO, "fedserver")
    for number, bounded in enumerate([{"ada": 4.0}, {"ada": 5.0}, {"ada": 4.0, "eve": 90.0}, {"eve": 90.0}], start=1):
        await standing.bounded(number, bounded, without_vote=())
    said = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert said == [("WARNING", "round 1"), ("INFO", "round 2"), ("WARNING", "round 3"), ("INFO", "round 4")]
