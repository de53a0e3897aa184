"""The server's exchanges with devices that are late, silent, or send what they should not."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from attune.common import aio
from attune.common.config import PrivacySettings
from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMessage
from attune.fedserver.core.messages import OrderId, Record
from attune.fedserver.federation.secure_rounds import SecureRounds, UnmaskedSum
from tests.common.secure.cohort import FEDERATION, NAMES, Cohort
from tests.fedserver.federation.masked_fleet import Accounted

PRIVACY = PrivacySettings(secure_aggregation=True, secure_devices=3, secure_wait_s=0.3)
LATER = ("survivors", "unmasking")


class Site(Accounted):
    """Devices that answer at once, or not at all from an exchange on, on a server's streams."""

    def __init__(self, silent: dict[str, str] | None = None, privacy: PrivacySettings = PRIVACY) -> None:
        super().__init__(NAMES)
        self.cohort, self.silent = Cohort(), silent or {}
        self.asked: list[tuple[str, str]] = []
        self.settings.privacy, self.streams = privacy, self
        self.rounds = SecureRounds(cast(Any, self), FEDERATION, self.note)  # type: ignore[arg-type]

    def send(self, name: str, message: SecureMessage) -> None:
        """Take the place of `Streams.send`: the device answers in the next step of the loop."""
        self.asked.append((name, message.exchange))
        if self.silent.get(name) != message.exchange:
            asyncio.get_running_loop().call_soon(self.answer, name, message)

    def answer(self, name: str, message: SecureMessage) -> None:
        cohort = self.cohort
        try:
            cohort.states[name], answer = cohort.members[name].answer(cohort.states[name], message, cohort.trained[name])
        except UpdateRefused as refusal:
            answer = SecureMessage(message.order_id, message.attempt, message.exchange, refused=str(refusal))
        if message.exchange == "masked" and not answer.refused:
            assert self.rounds.accepted(OrderId("train", 7, name), message.attempt)
            return
        try:
            self.rounds.answered(name, answer)
        except UpdateRefused:
            assert answer.refused

    def sum(self, record: Record = Record()) -> Coroutine[Any, Any, UnmaskedSum]:  # noqa: B008 - it is immutable
        return self.rounds.sum("first", record, 7, frozenset(NAMES))


def test_a_round_is_summed_and_its_survivors_are_noted_before_they_are_asked() -> None:
    site = Site()
    outcome = aio.run(site.sum())
    assert (outcome.refused, outcome.attempt, outcome.survivors) == ("", 1, frozenset(NAMES))
    assert [(event.attempt, event.fixed is not None) for event in site.attempted] == [(1, False), (1, True)]


@pytest.mark.parametrize("exchange", ["keys", "shares", "masked", "survivors", "unmasking"])
def test_a_silent_device_is_left_out_after_the_wait_and_counts_once_it_has_handed_in(exchange: str) -> None:
    outcome = aio.run(Site({"flo": exchange}).sum())
    assert (outcome.refused, outcome.survivors) == ("", frozenset(NAMES[:6] if exchange in LATER else NAMES[:5]))


@pytest.mark.parametrize(("exchange", "attempts"), [("keys", 3), ("masked", 3), ("survivors", 1), ("unmasking", 1)])
def test_too_few_answers_end_the_round_without_a_sum(exchange: str, attempts: int) -> None:
    site = Site(dict.fromkeys(NAMES[:3], exchange))
    outcome = aio.run(site.sum())
    assert "3 of 6 devices" in outcome.refused
    assert outcome.survivors == frozenset()
    assert {event.attempt for event in site.attempted} == set(range(1, attempts + 1)), "none after the survivors are fixed"


async def test_a_restarted_server_begins_again_or_goes_on_with_the_survivors() -> None:
    site = Site()
    site.cohort.until("masked")
    before = dict(site.cohort.states)
    outcome = await site.sum(Record(attempt=1))
    assert (outcome.attempt, outcome.survivors) == (2, frozenset(NAMES))
    assert all(site.cohort.states[name].root != before[name].root for name in NAMES)
    site.asked.clear()
    again = await site.sum(Record(attempt=2, fixed=site.attempted[-1].fixed))
    assert again == outcome
    assert {exchange for _, exchange in site.asked} == {"survivors", "unmasking"}
    later = await site.sum(Record(attempt=2))
    assert "0 of 6 devices" in later.refused, "devices hand in to no other sum of the round"


@pytest.mark.parametrize("exchanges", [("keys", "shares"), ("survivors", "unmasking"), ("masked", "survivors")])
async def test_a_silent_device_is_waited_for_once_and_is_not_in_the_next_cohort(exchanges: tuple[str, str]) -> None:
    site = Site({"flo": exchanges[0]})
    assert (await site.sum()).refused == ""
    site.cohort, site.silent = Cohort(), {"flo": exchanges[1]}
    assert (await site.sum()).refused == ""
    assert site.charged == [(exchanges[0], ["flo"])], "in debt, it is asked, and nobody waits for it"
    assert site.rules.policy.ask(site.round).cohort == NAMES[:5]


@pytest.mark.parametrize("revoked", [False, True])
def test_a_device_that_comes_back_is_asked_again_and_a_revoked_one_not_waited_for(revoked: bool) -> None:
    site = Site({"flo": "keys"}, PrivacySettings(secure_aggregation=True, secure_devices=3, secure_wait_s=30.0))

    async def scenario() -> UnmaskedSum:
        running = asyncio.ensure_future(site.sum())
        await asyncio.sleep(0.1)
        if revoked:
            site.rounds.drop("flo", "it was revoked")
        else:
            site.silent.clear()
            site.rounds.connected("flo")
        return await running

    assert aio.run(scenario()).survivors == frozenset(NAMES) - ({"flo"} if revoked else set())


def test_masked_updates_are_awaited_in_their_exchange_alone() -> None:
    site, order = Site(), OrderId("train", 7, "ada")
    assert not site.rounds.awaits(order)
    seen: list[bool] = []
    ask = site.send

    def send(name: str, message: SecureMessage) -> None:
        masked = message.exchange == "masked"
        seen.append(site.rounds.awaits(order) is masked and site.rounds.awaits(order, message.attempt) is masked)
        assert not site.rounds.awaits(order, message.attempt + 1)
        assert not site.rounds.awaits(OrderId("train", 6, "ada"))
        assert not site.rounds.awaits(OrderId("train", 7, "stranger"))
        assert not site.rounds.awaits(OrderId("evaluate", 7, "ada"))
        ask(name, message)

    site.send = send  # type: ignore[method-assign]
    aio.run(site.sum())
    assert seen and all(seen)
    assert not site.rounds.awaits(order)
    assert not site.rounds.accepted(order, 1)


def test_messages_outside_of_an_exchange_are_ignored() -> None:
    rounds = Site().rounds
    rounds.answered("ada", SecureMessage("train-7-ada", 1, "keys"))
    rounds.connected("ada")
    rounds.drop("ada", "gone")
