"""A survey's answers: late, wrong, from devices that were not asked, and too many bytes."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from attune.common import aio
from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.exchange.messages import StatisticsReport, StatisticsRequest
from attune.common.plan import DataSettings, Profile
from attune.common.protocol import NOISY_STATISTICS, STATISTICS
from attune.common.site_statistics import Centre, ColumnSums, NoisyLayout, NoisySums, SiteSketches, SiteSums
from attune.fedclient.data.site_sums import sketch_of
from attune.fedserver.federation import survey
from attune.fedserver.federation.streams import Stream, Streams
from attune.fedserver.federation.survey import SILENT, TOO_MUCH, TOO_OLD, Survey, without_statistics
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from tests.fedserver.federation.masked_fleet import Accounted, survey_of

PROFILE = Profile("tabular", (1,), ["no", "yes"], 10, 2, column_names=["age"])
NOISY = NoisySums(12, 2.0, [5.0, 7.5])
ASKS = PrivacySettings(unit="example", epsilon=4.0, statistics_epsilon=1.0)
CLASSES = DataSettings(classes=["no", "yes"])
AGES = np.arange(12.0)
SUMS = SiteSums(12, {"age": ColumnSums(12, 0, 5.5, 143.0)}, [6, 6])
Answer = Callable[[StatisticsRequest], StatisticsReport | None]


def honest(question: StatisticsRequest) -> StatisticsReport:
    if question.noisy_json:
        assert msgspec.json.decode(question.noisy_json, type=NoisyLayout).classes == ["no", "yes"]
        return StatisticsReport(question.id, msgspec.json.encode(NOISY))
    if not question.centres_json:
        return StatisticsReport(question.id, msgspec.json.encode(SUMS))
    centres = msgspec.json.decode(question.centres_json, type=dict[str, Centre])
    return StatisticsReport(question.id, msgspec.json.encode(SiteSketches({"age": sketch_of(AGES, centres["age"])})))


def surveyed(
    odd: Answer | None,
    known: tuple[str, ...] = (STATISTICS, NOISY_STATISTICS),
    patience_s: float = 5.0,
    noisy: PrivacySettings | None = None,
    books: Accounted | None = None,
) -> FleetStatistics:
    """Return the statistics of five honest devices and of Eve, who answers so, or not at all."""

    async def run() -> FleetStatistics:
        streams = Streams()
        fleet = survey_of(streams, noisy, CLASSES, books=books)
        answers: dict[str, Answer | None] = dict.fromkeys((f"d{number}" for number in range(5)), honest)
        answers["eve"] = odd
        for name in answers:
            streams.enter(Stream(name, PROFILE, known=known if name == "eve" else (STATISTICS, NOISY_STATISTICS)))

        async def device(name: str, answer: Answer | None) -> None:
            stream = streams.get(name)
            assert stream is not None
            while True:
                question = await stream.next()
                assert isinstance(question, StatisticsRequest)
                if answer is not None and (report := answer(question)) is not None:
                    fleet.reported(name, report)

        tasks = [asyncio.create_task(device(name, answer)) for name, answer in answers.items()]
        try:
            return await fleet.run((), patience_s)
        finally:
            for task in tasks:
                task.cancel()

    return aio.run(run())


def test_all_answers_are_added_up() -> None:
    found = surveyed(honest)
    assert found.devices == 6 and found.samples == 72 and found.without == {}
    assert found.columns["age"].mean == 5.5 and found.columns["age"].quantiles is not None


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda question: StatisticsReport("another", msgspec.json.encode(SUMS)), SILENT),
        (lambda question: StatisticsReport(question.id, b"{"), "its answer cannot be read"),
        (lambda question: StatisticsReport(question.id, b'{"samples":-1}'), "its answer cannot be read"),
        (lambda question: StatisticsReport(question.id, b"[" * 100_000), "its answer cannot be read"),
        (
            lambda question: StatisticsReport(question.id, b'{"samples":13}'),
            "its sums are not those of the data that it declares",
        ),
        (lambda question: StatisticsReport(question.id, refused="no"), "no"),
    ],
)
def test_a_device_that_answers_wrongly_is_left_out_by_name(odd: Answer | None, why: str) -> None:
    found = surveyed(odd, patience_s=2.0)
    assert found.devices == 5 and found.without == {"eve": why}


def test_a_device_that_has_a_new_stream_meanwhile_is_asked_again() -> None:
    async def run() -> FleetStatistics:
        streams = Streams()
        fleet = survey_of(streams)
        for name in "abcde":
            streams.enter(Stream(name, PROFILE, known=(STATISTICS,)))
        asked = asyncio.create_task(fleet.run((), 5.0))
        await asyncio.sleep(0.01)
        for name in "abcde":
            stream = Stream(name, PROFILE, known=(STATISTICS,))
            streams.enter(stream)  # what was sent on the stream before is lost
            fleet.connected(name)
            for _ in range(2):
                asyncio.create_task(_answers(fleet, name, stream))  # noqa: RUF006
        return await asked

    assert aio.run(run()).devices == 5


async def _answers(fleet: Survey, name: str, stream: Stream) -> None:
    question: Any = await stream.next()
    report: Any = honest(question)
    fleet.reported(name, report)


@pytest.mark.parametrize("noisy", [None, ASKS])
def test_a_device_that_was_silent_in_a_survey_is_not_waited_for_in_the_next(noisy: PrivacySettings | None) -> None:
    books = Accounted()
    for _ in range(4):
        assert surveyed(None, patience_s=2.0, noisy=noisy, books=books).without == {"eve": SILENT}
    assert books.charged == [("", ["eve"])]
    assert surveyed(honest, noisy=noisy, books=books).without == {}, "in debt, it is asked all the same"


@pytest.mark.parametrize(("known", "noisy"), [((), None), ((STATISTICS,), ASKS)])
def test_an_older_device_is_not_asked(known: tuple[str, ...], noisy: PrivacySettings | None) -> None:
    """It would not know the layout of noisy statistics, and would answer without noise."""
    assert surveyed(None, known=known, noisy=noisy).without == {"eve": TOO_OLD}


def test_answers_that_are_too_large_together_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(msgspec.json.encode(SUMS))
    monkeypatch.setattr(survey, "MOST_BYTES", 5 * size + 1)
    found = surveyed(honest)
    assert list(found.without.values()) == [TOO_MUCH]


def test_an_answer_without_a_question_is_dropped() -> None:
    fleet = survey_of(Streams())
    fleet.reported("eve", StatisticsReport("", b"{}"))
    assert "has 0" in repr(fleet)


def test_a_column_that_no_device_has_is_an_error() -> None:
    with pytest.raises(SettingError, match="no connected device has a column 'height'"):
        aio.run(survey_of(Streams()).run(("height",), 1.0))


def test_noisy_answers_are_added_up_with_their_error() -> None:
    seen = surveyed(honest, noisy=ASKS)
    assert seen.devices == 6 and seen.samples == 72 and seen.classes == {"no": 30, "yes": 45}
    assert seen.noise is not None and seen.noise.error == 2 * 6**0.5 and seen.without == {}


def test_a_device_without_a_noisy_answer_is_excused() -> None:
    short = msgspec.json.encode(NoisySums(12, 2.0, [5.0]))
    seen = surveyed(lambda question: StatisticsReport(question.id, short), noisy=ASKS)
    assert seen.devices == 5 and "not those of the data" in seen.without["eve"] and seen.classes == {"no": 25, "yes": 38}


@pytest.mark.parametrize(("unit", "why"), [("group", "set privacy.statistics_epsilon"), ("client", "privacy.clip bounds")])
def test_beside_noise_a_refusal_names_the_setting_that_allows_noisy_statistics(unit: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        aio.run(survey_of(Streams(), PrivacySettings(unit=unit)).run((), 1.0))
    assert without_statistics(PrivacySettings()) == ""
