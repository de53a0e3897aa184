"""Ordinary models alone in every view of the server, from reports that are made by hand."""

from typing import Any

import pytest

from attune.common.pictures.figures import Section
from attune.features.pictures import plot_accuracy, plot_devices
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.homes import render_status
from attune.fedserver.view.status import status
from attune.fedserver.view.summary import Summary, summarise
from attune.simulation import compare_views
from attune.simulation.compare import RunData, compared

ALONE = {"accuracy_alone": 0.5, "better_than_alone": 0, "worse_than_alone": 8}


def evaluation(name: str, won: int, lost: int, **more: Any) -> Report:
    """Return an evaluation in which what is kept beats ordinary models on `won` of 40 samples, and they it on `lost`."""
    counts = {"kept_better_than_alone": won, "kept_worse_than_alone": lost, "kept": "alone"}
    kept = 0.5 + (won - lost) / 40
    said = {"accuracy_before": 0.3, "accuracy_kept": kept, "test_samples": 40, "accuracy_constant": 0.25}
    return Report(round=2, work="evaluate", client=name, **(said | ALONE | counts | more))


def trained(name: str, number: int, before: float, after: float) -> Report:
    return Report(
        round=number, work="train", client=name, accuracy_before=before, accuracy_after=after, test_samples=40, loss=1.0
    )


ROWS = [
    *(trained(name, number, before, after) for number, before, after in ((1, 0.1, 0.2), (2, 0.4, 0.5)) for name in "ab"),
    evaluation("a", 12, 0),
    evaluation("b", 0, 12),
]
OLDER = [
    *ROWS[:4],
    Report(round=2, work="evaluate", client="a", accuracy_before=0.7, accuracy_common=0.4, accuracy_kept=0.7, kept="common",
           better_than_common=12, worse_than_common=0, kept_better_than_common=12, kept_worse_than_common=0, test_samples=40)
]  # fmt: skip


def summary_of(rows: list[Report]) -> Summary:
    return summarise(rows, resolve({"round": {"rounds": 2}}), "mlr", 2)


def heads(section: Section) -> list[str]:
    assert section.table is not None
    return list(section.table.heads)


def test_the_summary_is_of_what_is_kept_against_ordinary_models() -> None:
    summary = summary_of(ROWS)
    a, b = summary.clients
    assert (a.gain, a.rival, a.verdict, a.alone, a.accuracy_kept, a.kept) == (0.3, "alone", "better", 0.5, 0.8, "alone")
    assert (b.gain, b.verdict, b.own_accuracy) == (-0.3, "worse", 0.3)
    assert summary.latest["alone"].mean_over_clients == 0.5 and summary.latest["accuracy_kept"].mean_over_clients == 0.5
    assert [verdict["rival"] for verdict in summary.fleet] == ["alone"] and summary.kept == {"alone": 2}
    assert [(point.round, point.mean_over_clients) for point in summary.curves["kept"]] == [(2, 0.5)]


def test_an_earlier_device_is_compared_as_before() -> None:
    [a, _] = summary_of(OLDER).clients
    assert (a.gain, a.rival, a.verdict, a.alone) == (0.3, "common", "better", None)
    own = Report(
        round=2, work="evaluate", client="a", accuracy_before=0.7, better_than_local=9, worse_than_local=0, test_samples=30
    )
    [only] = summary_of([own]).clients
    assert (only.gain, only.rival, only.accuracy_kept, only.compared) == (0.3, "local", None, 0.7)


def test_the_page_names_the_rival_and_has_no_column_that_is_empty() -> None:
    summary = summary_of(ROWS)
    caption = plot_devices.helped(summary, {}).caption
    assert "what a device keeps is as high as that of the best ordinary model alone (scikit-learn)." in caption
    table = plot_devices.clients(summary)
    assert {"kept", "own", "alone"} <= set(heads(table)) and not {"local", "common"} & set(heads(table))
    older = summary_of(OLDER)
    assert "alone" not in heads(plot_devices.clients(older)) and "common" in heads(plot_devices.clients(older))
    assert "than that of the common model." in plot_devices.helped(older, {}).caption
    rows = {row[0]: row[1] for row in plot_accuracy.figures_of(summary).table.rows}  # type: ignore[union-attr]
    assert rows["best ordinary model alone (scikit-learn), latest: over all test samples"] == 0.5
    assert rows["what clients keep, latest: over all test samples"] == 0.5
    assert rows["clients that keep the best ordinary model"] == 2


@pytest.mark.parametrize("rows", [ROWS, OLDER])
def test_runs_side_by_side_have_what_their_devices_keep_and_ordinary_models(rows: list[Report]) -> None:
    runs = [RunData(name, "", summary_of(rows), rows) for name in "xy"]
    head, first = (line.split() for line in compare_views.render(compared(runs), runs).splitlines()[:2])
    assert ("alone" in head) == (rows is ROWS) and "kept" in head
    assert ("0.5000" in first) == (rows is ROWS) and ("+0.0000" in first) == (rows is ROWS)


@pytest.mark.parametrize("rows", [ROWS, OLDER])
def test_the_status_has_a_column_for_what_was_reported(rows: list[Report]) -> None:
    devices = (DeviceRecord("a", "k"), DeviceRecord("b", "l"))
    told = status(Snapshot({}, None, Record(round=2, phase=Phase.DONE), devices, (), tuple(rows)), set())
    head = next(line for line in render_status(told).splitlines() if line.startswith("device")).split()
    assert ("alone" in head) == (rows is ROWS) and "local" not in head and "kept" in head
    assert ("what devices keep against the best ordinary model alone (scikit-learn): " in render_status(told)) == (rows is ROWS)
