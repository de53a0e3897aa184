"""The one masked sum of a fleet's statistics: exact, made once, and repeated by a server that was killed."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.common.exchange.messages import SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.text import from_json
from attune.fedserver.core.scale import Scales
from attune.fedserver.federation.survey import CAME_LATER, NOT_ALLOWED
from attune.fedserver.ports.blobs import MASKED_STATISTICS, Damaged
from attune.fedserver.surveys.answers import KeptSum
from tests.fedserver.federation.masked_fleet import NAMES, MaskedFleet, MaskedSite, joined, tables

EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")
SHORT = 1.0  # seconds, for a question that a device never answers


def silent(exchange: str, *names: str) -> Any:
    """Return a change that loses what the server sends these devices in an exchange."""

    def change(name: str, message: Any) -> Any:
        return None if isinstance(message, SecureMessage) and message.exchange == exchange and name in names else message

    return change


def test_statistics_are_the_plain_ones_of_all_sites_together() -> None:
    shown = aio.run(MaskedFleet().run())
    assert (shown.devices, shown.samples, shown.without) == (6, 144, {})
    assert shown.classes == {"0": 72, "1": 72}
    for place, name in enumerate(("column 1", "column 2")):
        column, values = shown.columns[name], joined(NAMES, place)
        assert (column.devices, column.rows, column.missing) == (6, 144, 0.0)
        assert column.mean == pytest.approx(values.mean(), rel=1e-13)
        assert column.deviation == pytest.approx(values.std(), rel=1e-12)


def test_the_server_has_no_sum_of_one_device_and_masked_numbers_look_random() -> None:
    reports: list[bytes] = []
    fleet = MaskedFleet()
    take = fleet.survey.reported

    def spied(name: str, report: StatisticsReport) -> None:
        if report.masked:
            reports.append(report.masked)
        assert report.report_json == b""
        take(name, report)

    fleet.survey.reported = spied  # type: ignore[method-assign]
    aio.run(fleet.run())
    assert len(reports) == 6
    for number in reports:
        counts = np.bincount(np.frombuffer(number, np.uint8), minlength=256)
        assert np.square(counts - len(number) / 256).sum() / (len(number) / 256) < 400, "chi-square, 255 degrees of freedom"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_device_that_falls_silent_is_left_out_of_the_sum_until_it_has_handed_in(exchange: str) -> None:
    shown, later = aio.run(MaskedFleet(change=silent(exchange, "site5")).run(wait_s=SHORT)), exchange in EXCHANGES[3:]
    assert (shown.devices, shown.samples) == ((6, 144) if later else (5, 120))
    assert shown.columns["column 1"].mean == pytest.approx(joined(NAMES[: 5 + later], 0).mean(), rel=1e-13)
    assert shown.without == ({} if later else {"site5": CAME_LATER})


async def test_a_device_that_was_silent_to_the_question_is_not_waited_for_again() -> None:
    began, lost, questions = time.monotonic(), silent("keys", "site2", "site3", "site4"), StatisticsRequest
    fleet = MaskedFleet(change=lambda name, one: None if (name, type(one)) == ("site5", questions) else lost(name, one))
    for _ in range(2):
        with pytest.raises(SettingError, match="2 of 5 devices have sent keys"):
            await fleet.run(wait_s=SHORT)
    assert fleet.books.charged == [("", ["site5"])] and time.monotonic() - began < 4 * SHORT


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_too_few_answers_make_no_sum_and_a_later_question_makes_the_one_sum(exchange: str) -> None:
    """Before the survivors are fixed another try may have other devices; afterwards it has the same ones."""
    names = ("site2", "site3", "site4", "site5")
    fleet = MaskedFleet(change=silent(exchange, *names))
    with pytest.raises(SettingError, match=r"there are no masked statistics: secure aggregation: . of . devices"):
        aio.run(fleet.run(wait_s=SHORT))
    fleet.change = lambda name, message: message
    if exchange in ("survivors", "unmasking"):
        fixed = from_json(fleet.blobs.get(MASKED_STATISTICS), KeptSum)
        assert fixed.is_masked and len(fixed.fixed.survivors) == 6
    fleet.begin()
    for site in fleet.sites.values():
        site.restart()
    shown = aio.run(fleet.run())
    assert shown.devices == 6 and shown.columns["column 1"].mean == pytest.approx(joined(NAMES, 0).mean(), rel=1e-13)


def test_a_second_question_shows_the_same_sum_and_asks_nobody() -> None:
    fleet = MaskedFleet()
    first = aio.run(fleet.run())
    fleet.asked.clear()
    fleet.begin()
    assert aio.run(fleet.run()) == first
    assert aio.run(fleet.run(["column 2"])).columns == {"column 2": first.columns["column 2"]}
    assert fleet.asked == []
    with pytest.raises(SettingError, match="the one masked sum of this federation has no column 'age'"):
        aio.run(fleet.run(["age"]))


def test_without_what_the_server_has_kept_no_device_hands_in_again() -> None:
    """A server that forgets, or lies, gets no second sum over other devices: their difference would be one device's."""
    fleet = MaskedFleet()
    aio.run(fleet.run())
    fleet.blobs.remove([MASKED_STATISTICS])
    del fleet.sites["site0"]
    fleet.begin()
    with pytest.raises(SettingError, match=r"0 devices take part, and 5 must .*summed already"):
        aio.run(fleet.run())


def test_fewer_than_five_devices_have_no_statistics() -> None:
    with pytest.raises(SettingError, match="4 devices take part, and 5 must"):
        aio.run(MaskedFleet(tables(NAMES[:4])).run())
    fleet = MaskedFleet()
    fleet.sites["site0"] = MaskedSite("site0", tables()["site0"], disclose=())
    fleet.begin()
    shown = aio.run(fleet.run())
    assert shown.devices == 5 and shown.without == {"site0": NOT_ALLOWED}


def test_columns_that_a_device_lacks_or_has_no_value_in_leave_it_out() -> None:
    data: dict[str, Any] = dict(tables())
    x, y = data["site1"]
    data["site1"] = (x[:, :1], y)
    shown = aio.run(MaskedFleet(data).run())
    assert shown.devices == 5 and shown.without["site1"] == "it has no column 'column 2' of the masked sum"
    assert aio.run(MaskedFleet(data).run(["column 1"])).devices == 6


def answering(answer: Callable[[MaskedFleet, str], StatisticsReport]) -> MaskedFleet:
    """Return a fleet of which the first site hands in this instead of its masked number."""
    fleet = MaskedFleet()

    def change(name: str, message: Any) -> Any:
        if name == "site0" and isinstance(message, SecureMessage) and message.exchange == "masked":
            fleet.take(name, answer(fleet, message.of_statistics))
            return None
        return message

    fleet.change = change
    return fleet


@pytest.mark.parametrize(
    "answer",
    [
        lambda id: StatisticsReport(id, masked=b"short"),
        lambda id: StatisticsReport(id, refused="no"),
        lambda id: StatisticsReport("another", masked=b"short"),
    ],
)
def test_a_wrong_masked_number_leaves_its_device_out(answer: Any) -> None:
    assert aio.run(answering(lambda fleet, question: answer(question)).run(wait_s=SHORT)).devices == 5


def test_a_number_that_is_no_statistics_is_named_and_shown_by_nobody() -> None:
    fleet = answering(lambda fleet, id: StatisticsReport(id, masked=b"\x5a" * len(fleet.survey._number)))
    with pytest.raises(SettingError, match="a device has sent something else, and nobody knows which"):
        aio.run(fleet.run())


def test_a_device_with_another_layout_is_in_no_sum() -> None:
    """A server that gives devices different layouts gets no sum: their keys are signed for different ones."""

    def change(name: str, message: Any) -> Any:
        if name == "site0" and isinstance(message, StatisticsRequest):
            said = msgspec.json.decode(message.layout_json)
            said["columns"] = dict(reversed(said["columns"].items()))
            return StatisticsRequest(message.id, layout_json=msgspec.json.encode(said))
        return message

    shown = aio.run(MaskedFleet(change=change).run())
    assert shown.devices == 5, "site0's keys have a signature for another layout: the server itself leaves it out"


@pytest.mark.parametrize("text", [b"{", b'{"id":"a","layout":{"federation":"f"},"fixed":3,"number":""}'])
def test_a_damaged_sum_is_an_error_that_says_what_to_do(text: bytes) -> None:
    fleet = MaskedFleet()
    fleet.blobs.put(MASKED_STATISTICS, text)
    with pytest.raises(Damaged, match="restore it from a backup"):
        aio.run(fleet.run())


def test_more_columns_than_statistics_have_are_scaled_all_the_same() -> None:
    draw = np.random.default_rng(1)
    data = {name: (draw.normal(3, 2, (20, 300)).astype(np.float32), np.arange(20) % 2) for name in NAMES[:5]}
    fleet = MaskedFleet(data)
    with pytest.raises(SettingError, match="ask for at most 256"):
        aio.run(fleet.run())

    async def scaled() -> Scales:
        with fleet.at_work():
            return await fleet.survey.scale(fleet.streams.profiles())

    scale = aio.run(scaled()).features
    parts = np.concatenate([site.shard.load().train_x for site in fleet.sites.values()]).astype(np.float64)
    assert scale is not None and scale.mean == pytest.approx(parts.mean(axis=0), rel=1e-12)
    assert scale.std == pytest.approx(parts.std(axis=0), rel=1e-12)


def test_a_kept_sum_of_other_data_scales_nothing() -> None:
    fleet = MaskedFleet()
    aio.run(fleet.run())
    other = {name: msgspec.structs.replace(site.shard.profile, column_names=["a", "b"]) for name, site in fleet.sites.items()}
    assert aio.run(fleet.survey.scale(other)).features is None
    assert aio.run(fleet.survey.scale(fleet.streams.profiles())).features is not None
