"""A server that lies about a masked sum of statistics, to one device: it refuses, now and after a restart."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from attune.common import aio
from attune.common.config import PrivacySettings
from attune.common.exchange.messages import SecureMember, SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.site_statistics import Centre, MaskedLayout
from attune.common.text import from_json
from attune.fedclient.gate import Gate, PrivacyLimits
from attune.fedclient.secure_member import MemberState
from tests.fedclient.test_disclosing import plan
from tests.fedserver.federation.masked_fleet import NAMES, MaskedFleet, MaskedSite, tables

Lie = Callable[[SecureMessage], SecureMessage]


def said_to(exchange: str, lie: Lie) -> tuple[MaskedFleet, list[str]]:
    """Let the server lie to site0 in an exchange, and return the fleet and why site0 refused."""
    refusals: list[str] = []
    fleet = MaskedFleet()
    take = fleet.take

    def change(name: str, message: Any) -> Any:
        lies = name == "site0" and isinstance(message, SecureMessage) and message.exchange == exchange
        return lie(message) if lies else message

    def taken(name: str, answer: Any) -> None:
        if name == "site0" and answer.refused:
            refusals.append(answer.refused)
        take(name, answer)

    fleet.change, fleet.take = change, taken  # type: ignore[method-assign]
    aio.run(fleet.run())
    return fleet, refusals


LIES: dict[str, tuple[str, Lie, str]] = {
    "four devices": ("shares", lambda m: replace(m, members=m.members[:4], threshold=3), "sum over 4 devices"),
    "a device twice": ("shares", lambda m: replace(m, members=(m.members[0], *m.members)), "a device twice"),
    "without signatures": (
        "shares",
        lambda m: replace(m, members=tuple(replace(one, signature=b"") for one in m.members)),
        "signature of",
    ),
    "few masks": ("masked", lambda m: replace(m, members=m.members[:4]), "sum over 4 devices"),
    "few survivors": ("survivors", lambda m: replace(m, members=m.members[:4]), "sum over 4 devices"),
    "unsigned survivors": (
        "unmasking",
        lambda m: replace(m, members=tuple(SecureMember(one.name) for one in m.members)),
        "0 devices have signed",
    ),
    "other survivors": ("unmasking", lambda m: replace(m, members=m.members[:5]), "two sets of survivors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_an_exchange_is_refused(lie: str) -> None:
    exchange, change, why = LIES[lie]
    _, refusals = said_to(exchange, change)
    assert len(refusals) == 1 and why in refusals[0]


def questions(fleet: MaskedFleet) -> tuple[StatisticsRequest, dict[str, SecureMessage]]:
    """Run the fleet, and return what its server has said to site0."""
    asked: dict[str, SecureMessage] = {}
    first: list[StatisticsRequest] = []

    def change(name: str, message: Any) -> Any:
        if name == "site0":
            if isinstance(message, StatisticsRequest):
                first.append(message)
            else:
                asked[message.exchange] = message
        return message

    fleet.change = change
    aio.run(fleet.run())
    return first[0], asked


def replies(site: MaskedSite, *messages: Any) -> list[Any]:
    async def run() -> list[Any]:
        return [answer for message in messages for answer in await site.takes(message)]

    return aio.run(run())


@pytest.mark.parametrize("restart", [False, True])
def test_a_device_that_has_answered_hands_in_to_no_other_sum(restart: bool) -> None:
    fleet = MaskedFleet()
    question, asked = questions(fleet)
    site = fleet.sites["site0"]
    if restart:
        site.restart()
    another = StatisticsRequest("another", layout_json=question.layout_json)
    [report] = replies(site, another)
    assert "summed already" in report.refused and not report.masked
    fewer = replace(asked["unmasking"], members=asked["unmasking"].members[:5])
    answers = replies(site, question, fewer, replace(asked["keys"], attempt=2))
    assert [bool(answer.refused) for answer in answers] == [False, True, True]
    assert "two sets of survivors" in answers[1].refused and "summed already" in answers[2].refused


@pytest.mark.parametrize("exchange", ["keys", "shares", "masked", "survivors", "unmasking"])
def test_a_killed_device_repeats_its_answers(exchange: str) -> None:
    fleet = MaskedFleet()
    question, asked = questions(fleet)
    site = fleet.sites["site0"]
    before = replies(site, question, asked[exchange])
    site.restart()
    after = replies(site, question, asked[exchange])
    secrets = [[member.secret for member in getattr(answers[1], "members", ())] for answers in (before, after)]
    assert not before[1].refused and secrets[0] == secrets[1]
    if exchange == "masked":
        assert before[1] == after[1], "the same vector behind the same masks, bit by bit"


def test_a_message_before_the_question_is_refused() -> None:
    site = MaskedSite("site0", tables()["site0"])
    [answer] = replies(site, SecureMessage("statistics-1", 1, "keys"))
    assert "has not said what is to be summed" in answer.refused


def test_changed_data_are_not_masked_by_the_same_keys() -> None:
    fleet = MaskedFleet()
    question, asked = questions(fleet)
    x, y = tables()["site0"]
    changed = MaskedSite("site0", (x + 1, y))
    changed.store = fleet.sites["site0"].store
    changed.restart()
    answers = replies(changed, question, asked["masked"])
    assert "none for which this device has keys" in answers[1].refused


def test_a_damaged_state_gives_nothing() -> None:
    fleet = MaskedFleet()
    question, _ = questions(fleet)
    site = fleet.sites["site0"]
    site.store.keep("statistics", b"{")
    site.restart()
    assert ["is damaged" in answer.refused for answer in replies(site, question)] == [True]


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (MaskedLayout("fed", {"column 9": Centre(0.0, 1.0)}), "no value in the column 'column 9'"),
        (MaskedLayout("fed", {"column 2": Centre(0.0, 1.0)}), "no value in the column 'column 2'"),
        (MaskedLayout("fed", {"column 1": Centre(0.0, -1.0)}), "cannot be"),
        (MaskedLayout("fed", classes=["0"]), "classes are not those"),
        (MaskedLayout("fed", features=["column 1", "column 3"]), "features or targets are not those"),
        (MaskedLayout("fed", targets=["y"]), "features or targets are not those"),
    ],
)
def test_a_slot_that_this_device_cannot_fill_is_refused(layout: MaskedLayout, why: str) -> None:
    """Were it filled with nothing, the sum of a column that one other device has would be that device's own."""
    from attune.fedclient.data.lazy_shard import LazyShard
    from attune.fedclient.data.meta import Meta
    from attune.fedclient.data.shard import make_shard

    x, y = tables()["site0"]
    gaps = np.c_[x[:, 0], np.full(len(x), np.nan)].astype(np.float32)
    shard = make_shard(MaskedSite("site0", (x, y)).shard.load().path, "site0", (gaps, y), None, Meta(), keep_gaps=True)
    site = MaskedSite("site0", LazyShard.in_memory(shard))
    [report] = replies(site, StatisticsRequest("1", layout_json=msgspec.json.encode(layout)))
    assert why in report.refused and not report.masked


def test_an_unreadable_layout_is_refused() -> None:
    [report] = replies(MaskedSite("site0", tables()["site0"]), StatisticsRequest("1", layout_json=b"{"))
    assert "cannot be read" in report.refused


@pytest.mark.parametrize(
    ("agreed", "options", "why"),
    [
        (None, {"disclose": ()}, "--disclose masked-statistics"),
        (None, {"privacy": PrivacyLimits(epsilon=4.0)}, "only with noise"),
        (plan(privacy=PrivacySettings(unit="example", epsilon=4.0)), {}, "only with noise"),
        (plan(privacy=PrivacySettings(unit="client", epsilon=4.0, devices=100)), {}, "only with noise"),
    ],
)
def test_the_owner_and_noise_forbid_masked_statistics(agreed: Any, options: dict[str, Any], why: str) -> None:
    site = MaskedSite("site0", tables()["site0"], **options)

    async def run() -> None:
        layout, gate = msgspec.json.encode(MaskedLayout("fed")), Gate(site.options, agreed)
        await site.discloser.answer(StatisticsRequest("1", layout_json=layout), gate)
        await site.discloser.exchange(SecureMessage("statistics-1", 1, "keys"), gate)

    aio.run(run())
    assert len(site.said) == 2 and all(why in answer.refused for answer in site.said)
    assert site.store.kept("statistics") is None


def test_masked_statistics_do_not_allow_statistics_as_they_are() -> None:
    [report] = replies(MaskedSite("site0", tables()["site0"]), StatisticsRequest("1"))
    assert isinstance(report, StatisticsReport) and "--disclose statistics" in report.refused and not report.report_json


def test_an_owner_may_ask_for_more_devices() -> None:
    fleet = MaskedFleet()
    fleet.sites["site0"] = MaskedSite("site0", tables()["site0"], privacy=PrivacyLimits(devices=7))
    fleet.begin()
    assert aio.run(fleet.run()).devices == 5
    kept = from_json(fleet.sites["site0"].store.kept("statistics"), MemberState)
    assert kept.answered == 0 and NAMES[0] not in kept.survivors
