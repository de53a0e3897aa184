"""A metric with a descriptor is in every view, without other changes."""

import csv

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from attune.common.config import TrainSettings
from attune.common.metrics import METRICS, MetricDescriptor, Metrics
from attune.common.plan import ModelSpec, Plan
from attune.contrib.publish import points
from attune.features.web.facts import CondensedReports, PageFacts
from attune.features.web.parts import parts
from attune.features.web.prometheus import exposition
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.export import write_tables
from attune.fedserver.view.status import status
from attune.fedserver.view.summary import summarise
from attune.simulation.compare import RunData, compared
from docs import tables

WARMTH = MetricDescriptor("warmth", "warmth of the device", "Temperature of the processor", "K", "lower", chart="Warmth")
EFFORT = MetricDescriptor("effort", "energy", "Energy of the work", "J", "lower", "round", "sum")
PLAN = Plan("federation", 7, ModelSpec("mlr", "tabular", (4,), 2), [0, 1], "fedavg", {}, TrainSettings())


class LongerRow(Report, frozen=True, kw_only=True):
    warmth: float | None = None
    effort: float | None = None


ROWS = [
    LongerRow(round=1, work="train", client="anna", warmth=300.0, effort=5.0),
    LongerRow(round=1, work="train", client="ben", warmth=320.0, effort=7.0),
    LongerRow(round=2, work="train", client="anna", warmth=310.0, effort=9.0),
]


@pytest.fixture(autouse=True)
def with_the_new_metrics(monkeypatch):
    for metric in (WARMTH, EFFORT):
        monkeypatch.setitem(METRICS, metric.name, metric)


@pytest.fixture
def snapshot():
    return Snapshot({}, None, Record(round=2), (DeviceRecord("anna", "k"), DeviceRecord("ben", "l")), (), tuple(ROWS))


@pytest.fixture
def facts(snapshot):
    condensed = CondensedReports()
    condensed.add(ROWS)
    return PageFacts("home", status(snapshot, set()), condensed.lines, condensed.totals)


def test_every_field_has_one_descriptor_in_the_same_order():
    assert [name for name in METRICS if name not in ("warmth", "effort")] == [
        name
        for name in Metrics.__struct_fields__
        if name not in ("fitted", "roc", "others")  # votes, curves and scores of other models: no single numbers
    ]


def test_it_is_in_the_reference_table():
    assert "| `warmth` | Temperature of the processor | K | lower | device |" in list(tables.metrics())


def test_it_is_in_the_export(snapshot, tmp_path):
    write_tables(snapshot, PLAN, tmp_path)
    lines = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [line["warmth"] for line in lines] == ["300.0", "320.0", "310.0"]
    saved = msgspec.json.decode((tmp_path / "status.json").read_bytes())
    assert [client["warmth"] for client in saved["clients"]] == [310.0, 320.0]


def test_it_is_in_the_status(snapshot):
    assert [(client["warmth"], client["effort"]) for client in status(snapshot, set())["clients"]] == [
        (310.0, 9.0),
        (320.0, 7.0),
    ]


def test_prometheus_sees_the_mean_over_devices(facts):
    families = {family.name: family for family in text_string_to_metric_families(exposition(facts).decode())}
    warmth = families["attune_reported_warmth"]
    assert (warmth.documentation, warmth.samples[0].value) == ("Temperature of the processor; mean over devices.", 315.0)


def test_the_dashboard_has_it_by_device_and_draws_it_by_round(facts):
    page = parts(facts)
    assert {"name": "warmth", "title": "warmth of the device", "unit": "K", "chart": "Warmth"} in page["run"]["charts"]
    assert [line["warmth"] for line in page["rounds"]] == [310.0, 310.0]
    assert [device["warmth"] for device in page["devices"]] == [310.0, 320.0]
    assert [device["totals"]["effort"] for device in page["devices"]] == [14.0, 7.0]
    assert page["run"]["effort"] == 21.0


def test_publish_and_compare_have_it():
    run = RunData("r", "", summarise(ROWS, resolve({}), "mlr", 2), ROWS)
    assert ("reports/warmth/train", 310.0, 1) in list(points(run))
    assert compared([run])[0].metrics["warmth"] == 315.0
