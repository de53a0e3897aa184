"""deploy/grafana.json against /metrics of a real server of a real run: every query has its series."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import attune
from attune.features.web.pages import of_home
from attune.fedserver.home import ServerHome
from tests.e2e.harness import tabular_shard
from tests.features.web.conftest import TOKEN

FILE = Path(__file__).parents[3] / "deploy" / "grafana.json"
QUERIES = [
    (panel["title"], target) for panel in json.loads(FILE.read_text(encoding="utf-8"))["panels"] for target in panel["targets"]
]
SELECTOR = re.compile(r"([a-z_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=|!=|=~)"([^"]*)"')
BY_PROMETHEUS = {"job", "instance"}
ONLY_WHILE_IT_RUNS = {"attune_left_seconds"}
NOT_YET = {"attune_certificate_expires_seconds", "attune_last_backup_seconds"}
ALERTS = FILE.with_name("alerts.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the home of a run whose devices compared their models."""
    folder = tmp_path_factory.mktemp("grafana")
    shards = [tabular_shard(folder / f"site-{n}", seed=n, samples=30) for n in range(2)]
    attune.simulate(shards, "fedavg+ft", rounds=2, baseline="local", home=folder / "home", progress=False)
    return ServerHome(folder / "home" / "server")


@pytest.fixture
def scraped(run, served):
    """Return the labels of each series, by name."""
    answer = served(of_home(run)).ask("/metrics", token=TOKEN)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_every_query_asks_for_series_and_labels_that_there_are(scraped):
    assert len(QUERIES) > 15
    for title, target in QUERIES:
        selectors = SELECTOR.findall(target["expr"])
        assert selectors, title
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for name, matchers in selectors:
            if name in ONLY_WHILE_IT_RUNS | NOT_YET:
                continue  # the next tests check these
            assert name in scraped, (title, name)
            assert labels <= set(scraped[name][0]) | BY_PROMETHEUS, (title, labels)
            for label, how, value in MATCHER.findall(matchers):
                chosen = label in BY_PROMETHEUS or how == "=~"  # a variable of the dashboard
                assert chosen or value in {each[label] for each in scraped[name]}, (title, label, value)


def test_devices_and_servers_can_be_chosen(scraped):
    variables = {variable["name"]: variable for variable in json.loads(FILE.read_text(encoding="utf-8"))["templating"]["list"]}
    assert list(variables) == ["source", "job", "instance", "device"]
    for name in ("instance", "device"):
        series, label = re.fullmatch(r"label_values\((\w+)\{[^}]*\}, (\w+)\)", variables[name]["query"]).groups()
        assert series in scraped
        assert label == name
    for title, target in QUERIES:
        assert 'instance=~"$instance"' in target["expr"], title
        assert ("{{device}}" in target["legendFormat"]) == ('device=~"$device"' in target["expr"]), title


def test_every_alert_asks_for_series_and_labels_that_there_are(scraped):
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 5
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        selectors = SELECTOR.findall(rule["expr"])
        assert selectors, rule["alert"]
        for name, matchers in selectors:
            assert name in scraped or name in NOT_YET | {"up"}, rule["alert"]
            for label, _, values in MATCHER.findall(matchers):
                known = {labels.get(label) for labels in scraped.get(name, ())}
                for value in values.split("|"):
                    assert label in BY_PROMETHEUS or value in known, (rule["alert"], label, value)


def test_series_of_other_labels_are_joined_by_those_of_their_server():
    """Without `on`, series with and without a label of their own never meet, and such an alert never fires."""
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    joined = " ".join(rule["expr"] for rule in group["rules"])
    assert len(re.findall(r"\b(?:and|unless) on \(job, instance\) ", joined)) > 3
    assert not re.findall(r"\b(?:and|unless|or)\b(?! on \(job, instance\) )", joined)


def test_every_series_is_documented_by_its_help_and_counters_say_total(scraped):
    own = {name for name in scraped if name.startswith("attune_")}
    assert {name for name in own if name.endswith("_total")} == {
        "attune_moved_bytes_total", "attune_answers_total", "attune_slowest_device_seconds_total", "attune_faults_total",
    }  # fmt: skip


def test_series_that_there_are_only_while_it_runs_or_with_certificates(served):
    """Use a server's facts about the remaining time and certificates."""
    from dataclasses import replace

    from attune.features.web.facts import PageFacts
    from tests.features.web.conftest import Source
    from tests.features.web.test_guard import EMPTY

    running = dict(EMPTY.status) | {"running": True, "state": "training", "round": 3, "rounds": 10}
    facts = replace(PageFacts("server", running, []), round_s=2.0)
    assert "attune_left_seconds 14.0" in served(Source(facts)).ask("/metrics", token=TOKEN).text

    from attune.fedserver.core.messages import Record
    from attune.fedserver.core.records import DeviceRecord
    from attune.fedserver.ports.ledger import Snapshot
    from attune.fedserver.view.status import status

    devices = (DeviceRecord("anna", "key"), DeviceRecord("ben", "another", revoked=True))
    said = status(Snapshot(None, None, Record(), devices, (), ()), set())
    facts = PageFacts("server", said, [], expires={"anna": 1800000000.0, "ben": 1700000000.0}, opened_at=1600000000.0)
    text = served(Source(facts)).ask("/metrics", token=TOKEN).text
    assert 'attune_certificate_expires_seconds{device="anna"} 1.8e+09' in text
    assert 'device="ben"' not in text, "nobody renews the certificate of a revoked device"
    assert "attune_round_opened_seconds 1.6e+09" in text
