"""Statistics that a device gives or refuses: a server may ask although its plan has privacy."""

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from attune.common import aio
from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.exchange.messages import Description, StatisticsReport, StatisticsRequest, Welcome
from attune.common.plan import ModelSpec, Plan, Profile
from attune.common.protocol import DESCRIPTION
from attune.common.site_statistics import NoisyColumn, NoisyLayout, NoisySums, SiteSums
from attune.common.text import from_json
from attune.fedclient.address import ServerAddress
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.disclosing import Discloser, hello_of
from attune.fedclient.gate import Gate, PrivacyLimits
from attune.fedclient.options import DeviceOptions
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.store import MemoryStore
from attune.fedclient.work.worker import Worker

X, Y = np.arange(24.0, dtype=np.float32).reshape(12, 2), np.arange(12) % 2


def plan(**said: Any) -> Plan:
    return Plan("f", 0, ModelSpec("mlr", "tabular", (2,), 2), [0, 1], "fedavg", {}, TrainSettings(), **said)


SHARD: LazyShard = shard_of("kiel", (X, Y))


def given(**options: Any) -> DeviceOptions:
    """Return options of a device that discloses statistics, unless they say otherwise."""
    return DeviceOptions(Path(), ServerAddress("localhost", 1), Path(), **({"disclose": ("statistics",)} | options))


def said_by(options: DeviceOptions, act: Callable[[Discloser], Coroutine[Any, Any, None]]) -> list[Any]:
    """Return what a device tells the server and its user while its discloser acts."""
    said: list[Any] = []

    async def run() -> None:
        with Worker() as worker:
            link = cast(Any, SimpleNamespace(answer=said.append))
            await act(Discloser(options, SHARD, MemoryStore(), link, worker, said.append))

    aio.run(run())
    return said


def answered(
    agreed: Plan | None, question: StatisticsRequest | None = None, lines: int = 0, **options: Any
) -> StatisticsReport:
    """Return the report of a device that discloses statistics, unless the options say otherwise, after so many lines."""
    gate = Gate(given(**options), agreed)
    said = said_by(gate.options, lambda discloser: discloser.answer(question or StatisticsRequest("1"), gate))
    *printed, report = said  # what the device's user is told comes first
    assert len(printed) == lines
    return report


def test_sums_are_given_before_and_under_a_plan_without_privacy() -> None:
    for agreed in (None, plan()):
        report = answered(agreed)
        sums = from_json(report.report_json, SiteSums)
        assert (report.id, report.refused, sums.samples) == ("1", "", 12)
        assert sum(column.rows for column in sums.columns.values()) == 24 and sum(sums.classes) == 12


@pytest.mark.parametrize(
    ("agreed", "options", "why"),
    [
        (None, {"disclose": ()}, "--disclose statistics"),
        (None, {"privacy": PrivacyLimits(epsilon=4.0)}, "only with noise"),
        (plan(privacy=PrivacySettings(unit="example", epsilon=4.0)), {}, "only with noise"),
        (plan(privacy=PrivacySettings(unit="client", epsilon=4.0, devices=100)), {}, "only with noise"),
        (plan(transforms={"secure-sum-4": {}}), {}, "only masked"),
    ],
)
def test_a_device_refuses_statistics_beside_privacy(agreed: Plan | None, options: dict[str, Any], why: str) -> None:
    report = answered(agreed, **options)
    assert why in report.refused and report.report_json == b""


def test_a_question_for_too_many_columns_is_refused() -> None:
    many = StatisticsRequest("2", tuple(f"c{number}" for number in range(300)))
    assert "more than 256 columns" in answered(None, many).refused


LAYOUT = NoisyLayout("f", "example", 1.0, 1e-5, 4.0, {"column 1": NoisyColumn((0.0, 24.0))}, ["0", "1"])


def noisy(layout: NoisyLayout = LAYOUT, **more: Any) -> StatisticsRequest:
    return StatisticsRequest("3", noisy_json=msgspec.json.encode(layout), **more)


@pytest.mark.parametrize("more", [{}, {"layout_json": b"{}"}, {"centres_json": b"{}"}])
def test_under_privacy_a_question_for_noise_gets_noisy_sums_alone(more: dict[str, Any]) -> None:
    """Also a server that asks for something else at the same time gets nothing without noise."""
    agreed = plan(privacy=PrivacySettings(unit="example", epsilon=4.0, statistics_epsilon=1.0))
    report = answered(agreed, noisy(**more))
    sums = from_json(report.report_json, NoisySums)
    assert (report.refused, report.masked, sums.units, len(sums.values)) == ("", b"", 12, 25)
    assert sums.deviation > 5 and any(value != round(value) for value in sums.values)


@pytest.mark.parametrize(
    ("agreed", "question", "options", "why"),
    [
        (None, noisy(), {"disclose": ()}, "--disclose statistics"),
        (None, noisy(), {"disclose": ("masked-statistics",)}, "--disclose statistics"),
        (None, noisy(), {"privacy": PrivacyLimits(epsilon=0.5)}, "its privacy budget is spent"),
        (None, noisy(), {"privacy": PrivacyLimits(epsilon=4.0, delta=1e-9)}, "--max-delta"),
        (plan(privacy=PrivacySettings(unit="example", epsilon=4.0)), noisy(), {}, "privacy.statistics_epsilon"),
        (plan(transforms={"secure-sum-4": {}}), noisy(), {}, "only masked"),
        (None, noisy(msgspec.structs.replace(LAYOUT, classes=[], columns={})), {}, "for 0 numbers"),
        (None, noisy(msgspec.structs.replace(LAYOUT, unit="group")), {}, "name none"),
        (None, StatisticsRequest("3", noisy_json=b"["), {}, "cannot be read"),
        (None, StatisticsRequest("3", centres_json=b"["), {}, "cannot be read"),
    ],
)
def test_a_question_for_noise_that_asks_for_too_much_is_refused(
    agreed: Plan | None, question: StatisticsRequest, options: dict[str, Any], why: str
) -> None:
    report = answered(agreed, question, **options)
    assert why in report.refused and report.report_json == b""


def test_a_damaged_ledger_gives_no_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    (tmp_path / "privacy" / "damaged").mkdir(parents=True)
    (tmp_path / "privacy" / "damaged" / "ledger.json").write_text("{")
    report = answered(None, noisy(), lines=1)
    assert "ledger cannot be used" in report.refused and str(tmp_path) not in report.refused


def described(embedding: str = "described", noise: PrivacySettings | None = None, **options: Any) -> list[Any]:
    """Return what a device says of its data under a plan, then on a new stream with this plan, then with another one."""
    spec = ModelSpec("mlr", "tabular", (2,), 2)
    agreed = Plan("f", 0, spec, [0, 1], "pfedhn", {"embedding": embedding}, TrainSettings(validation=0.0), privacy=noise)

    async def act(discloser: Discloser) -> None:
        discloser.heard(Welcome(b"this plan"))
        await discloser.describe(Gate(given(**options), agreed), b"this plan")
        discloser.heard(Welcome(b"this plan"))
        discloser.heard(Welcome(b"another plan"))

    said = said_by(given(**options), act)
    assert (DESCRIPTION in hello_of(given(**options), SHARD, empty=False).encodings) == bool(said) or embedding != "described"
    return said


def test_a_description_has_the_moments_of_the_inputs_and_is_told_on_every_stream() -> None:
    """Describe by a linear model: what enters its head are the features, which the device standardises by its own numbers."""
    once, again = described()
    assert once == again
    assert np.allclose(once.moments, [0, 0, 1, 1], atol=1e-6)


def test_a_device_describes_its_data_only_if_it_is_asked_and_allows_it() -> None:
    ways: tuple[dict[str, Any], ...] = (
        {"embedding": "trained"},
        {"disclose": ()},
        {"disclose": ("masked-statistics",)},
        {"privacy": PrivacyLimits(epsilon=4.0)},
    )
    for silent in ways:
        assert described(**silent) == []
    assert described(noise=PrivacySettings(unit="example", epsilon=4.0)) == [Description(())] * 2


@pytest.mark.parametrize(
    ("limits", "declared", "labels", "sums"),
    [
        (PrivacyLimits(), False, [0, 1], True),
        (PrivacyLimits(epsilon=4.0), False, [], False),
        (PrivacyLimits(delta=1e-5), False, [], False),
        (PrivacyLimits(epsilon=4.0), True, [0, 1, 2], False),
    ],
)
def test_with_a_limit_of_privacy_the_server_learns_neither_classes_nor_sums(
    limits: PrivacyLimits, declared: bool, labels: list[int], sums: bool, tmp_path: Path
) -> None:
    """Which class occurs can depend on one sample. Classes that meta.json declares say nothing of the samples."""
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=X, y=Y)
    meta = {"standardise": "federation"} | ({"classes": [0, 1, 2]} if declared else {})
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    hello = hello_of(given(privacy=limits), LazyShard.on_disk(tmp_path), empty=False)
    told = from_json(hello.profile_json, Profile)
    assert (told.labels, told.columns is not None) == (labels, sums)


def test_a_device_with_a_limit_of_privacy_proposes_no_schema() -> None:
    with pytest.raises(SettingError, match=r"--schema auto tells the server of single rows.*--schema FILE"):
        given(privacy=PrivacyLimits(epsilon=4.0), table=ReadOptions.of("", schema="auto"))


def test_names_of_numbers_to_predict_are_told_in_any_case() -> None:
    shard = shard_of("kiel", (X, X[:, :1]), ReadOptions.of("", task="regression"))
    hello = hello_of(given(privacy=PrivacyLimits(epsilon=4.0)), shard, empty=False)
    told = from_json(hello.profile_json, Profile)
    assert told.labels and told.targets is None
