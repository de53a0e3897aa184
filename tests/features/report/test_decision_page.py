"""`fedserver report`: three hospitals with 4 % events get a page of what can be said, offline; hostile words are escaped."""

import itertools
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import attune
from attune.common.config import PrivacySettings
from attune.common.errors import HomeMismatch, NoModel
from attune.common.metrics import FALSE_RATES, METRICS
from attune.common.plan import ONE_MEAN
from attune.common.statistics import strongest
from attune.features.report.report_page import page_of
from attune.fedserver.view.homes import render_status
from attune.simulation.result import SimulationResult

QUESTION = "Should Kiel, Lund and Oslo predict readmission together?"
VOID = {"meta", "line", "circle", "path"}


class Page(HTMLParser):
    """Structure of a page: its cells by table, its text, and every attribute. An element that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.text = self.style = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def hospital(seed: int) -> tuple[Any, ...]:
    """Return 2,500 patients, 100 of them with the event, a quarter of them to test: (train x, train y, test x, test y)."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(2500) < 100).astype(int)
    direction = np.random.default_rng(0).normal(size=8) / 3
    x = (rng.normal(size=(2500, 8)) + np.outer(y, direction) * 1.5).astype("f4")
    return x[:1875], y[:1875], x[1875:], y[1875:]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulationResult, Path]:
    home = tmp_path_factory.mktemp("hospitals") / "home"
    shards = {name: hospital(seed) for seed, name in enumerate(("Kiel", "Lund", "Oslo"))}
    settings = {"train.local_epochs": 1, "server.name": "Northern hospitals"}
    return attune.simulate(shards, "fedavg", "mlr", 2, settings=settings, baseline="alone", home=home, progress=False), home


def test_three_hospitals_get_their_aurocs_tests_pooled_effect_and_what_left(
    hospitals: tuple[SimulationResult, Path], tmp_path: Path
) -> None:
    result, home = hospitals
    path = result.report(tmp_path / "report.html", QUESTION)
    assert attune.report(tmp_path / "again.html", QUESTION, home / "server").read_bytes() == path.read_bytes()
    page, clients = Page(path.read_text("utf-8")), {client["name"]: client for client in result.status["clients"]}
    sites, left, made = page.tables
    assert sites[0][:5] == ["site", "samples to train", "to test", "AUROC of what it predicts with", "AUROC alone"]
    assert [row[0] for row in sites[1:]] == ["Kiel", "Lund", "Oslo"]
    for name, train, test, kept, alone, gain, p, _ in sites[1:]:
        client, pair = clients[name], strongest(clients[name])
        assert pair is not None and pair.rival == "alone" and (train, test) == ("1875", "625")
        assert kept == "{:.3f} ({:.3f} to {:.3f})".format(*(client[f"auroc_{one}"] for one in ("kept", "low", "high")))
        assert alone == f"{client['auroc_alone']:.3f}" and p == f"{client['auroc_p_alone']:.2g}"
        assert gain == f"{client['auroc_gain_alone']:+.3f} ({pair.interval()[0]:+.3f} to {pair.interval()[1]:+.3f})"
    assert result.status["auroc"]["words"] in page.text and QUESTION in page.text and "Northern hospitals" in page.text
    assert "a forecast needs 5 sites" in page.text and "no guarantee is given" in page.text
    assert ["numbers of samples", "server, readers of the dashboard", "sent"] in left
    assert ["training", "fedavg, 2 of 2 rounds"] in made
    assert sum(name == "class" and value in ("better", "worse", "unclear") for name, value in page.attributes) == 4


def test_the_sites_roc_curves_and_their_mean_are_drawn(hospitals: tuple[SimulationResult, Path], tmp_path: Path) -> None:
    result, _ = hospitals
    rocs = [row.roc for row in result._outcome.snapshot.rows if row.work == "evaluate" and row.round == 2]
    assert len(rocs) == 3 and all(len(roc[kind]) == len(FALSE_RATES) for roc in rocs for kind in ("kept", "alone"))
    page = Page(result.report(tmp_path / "report.html").read_text("utf-8"))
    lines: dict[str | None, list[str]] = {}
    for (name, kind), (_, drawn) in itertools.pairwise(page.attributes):
        if name == "class" and kind and kind.startswith(("kept", "alone")):
            lines.setdefault(kind, []).append(str(drawn))
    assert {kind: len(drawn) for kind, drawn in lines.items()} == {
        "kept site": 3,
        "alone site": 3,
        "kept mean": 1,
        "alone mean": 1,
    }
    for kind in ("kept", "alone"):
        at_tenth = np.mean([roc[kind][FALSE_RATES.index(0.1)] for roc in rocs])
        assert f"{at_tenth:.2f} by " in page.text
        assert f"{56 + 320 * 0.1:.1f} {6 + 320 * (1 - at_tenth):.1f}" in lines[f"{kind} mean"][0]
    assert "the mean of 3 sites, each counted once" in page.text


def test_under_masks_no_curve_leaves_and_plan_and_page_say_what_masked_sums_give(tmp_path: Path) -> None:
    shards = {name: hospital(seed) for seed, name in enumerate("abc")}
    settings = {"privacy.secure_aggregation": True, "privacy.secure_devices": 3, "train.local_epochs": 1}
    result = attune.simulate(shards, "fedavg", "mlr", 1, settings=settings, baseline="alone", progress=False)
    assert all(row.roc == {} for row in result._outcome.snapshot.rows), "masked sums give means alone"
    assert any(row.auroc_kept is not None for row in result._outcome.snapshot.rows), "evaluations are as usual"
    assert result.status["score"].endswith(ONE_MEAN) and ONE_MEAN in render_status(result.status)
    page = Page(result.report(tmp_path / "report.html").read_text("utf-8"))
    assert f"How sites' ROC curves lie: {ONE_MEAN}." in page.text


def test_the_page_needs_no_network_and_no_script_and_has_dark_phone_and_print_styles(
    hospitals: tuple[SimulationResult, Path], tmp_path: Path
) -> None:
    text = hospitals[0].report(tmp_path / "report.html").read_text("utf-8")
    page = Page(text)
    names = {name for name, _ in page.attributes}
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "a"}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "href", "action", "style"})
    assert "://" not in text and "url(" not in page.style and "@import" not in page.style
    for rule in ("(prefers-color-scheme: dark)", "@media print", "@media screen and (max-width"):
        assert rule in page.style
    assert "anywhere" not in page.style, "a browser breaks the names of narrow columns within words"
    heads = [value for name, value in page.attributes if name == "data-head"]
    assert heads == [head for rows in page.tables for _ in rows[1:] for head in rows[0]], "a phone shows it beside each cell"
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_hostile_words_are_text_and_what_cannot_be_said_is(hospitals: tuple[SimulationResult, Path]) -> None:
    result, bad = hospitals[0], "</td></table><script>alert(1)</script>\u202e\x1b[2J&<b>"
    snapshot, status = result._outcome.snapshot, result.status
    assert snapshot.plan is not None
    plan = msgspec.structs.replace(snapshot.plan, classes=[bad, "x"], privacy=PrivacySettings(secure_aggregation=True))
    first, second, third = status["clients"]
    few = dict.fromkeys(METRICS)
    listed = [
        {**first, "name": bad, "probably": bad},
        {**second, **few, "verdict": "too few cases"},
        {**third, **few, "verdict": None},
        {**third, **few, "verdict": None, "name": "gone", "state": "revoked"},
    ]
    hostile = {
        **status,
        "clients": listed,
        "standardisation": bad,
        "no_better_than_constant": [bad],
        "state": bad,
        "auroc": None,
    }
    page = Page(page_of(replace(snapshot, plan=plan), hostile, bad))
    assert "script" not in page.tags and "b" not in page.tags and len(page.tables) == 3
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert page.tables[0][1][0].startswith("</td></table><script>") and "gone" not in page.text
    assert "Lund: too few cases. Fewer than 10 test samples" in page.text
    assert "Oslo: no comparison was reported" in page.text
    assert "that needs 3 sites with a result, and 1 have one" in page.text
    scores = next(row for row in page.tables[1] if row[0].startswith("AUROC of what is kept"))
    assert scores[2] == "in training: not sent; in evaluations: unless --metrics none"


def test_a_run_without_a_plan_or_of_no_name_is_refused(hospitals: tuple[SimulationResult, Path], tmp_path: Path) -> None:
    result, home = hospitals
    snapshot = result._outcome.snapshot
    with pytest.raises(NoModel, match="has not started"):
        page_of(replace(snapshot, plan=None), result.status)
    with pytest.raises(HomeMismatch, match="holds no federation"):
        attune.report(tmp_path / "report.html", home=home / "server", run="second")
