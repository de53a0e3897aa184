"""The first section of the page of `fedserver plot`: what a reader without technical knowledge is told of the result."""

from pathlib import Path
from typing import Any

import pytest

from attune.common.config import TrainSettings
from attune.common.metrics import METRICS
from attune.common.plan import ModelSpec, Plan
from attune.common.task import TaskName
from attune.features.pictures import plots
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.ports.ledger import Snapshot
from attune.simulation.memory import MemoryBlobs
from tests.fedserver.view.test_alone import evaluation, trained
from tests.pictures import Page

COSTS: dict[str, Any] = {"test_samples": 40, "epsilon": 2.0, "seconds": 1.0, "bytes_up": 10, "bytes_down": 10}


def withheld(name: str) -> list[Report]:
    """Return what the server is told by a device that keeps its scores to itself: counts and costs."""
    training = Report(round=1, work="train", client=name, **COSTS | {"epsilon": 1.0})
    return [training, Report(round=2, work="evaluate", client=name, **COSTS)]


def page_of(rows: list[Report], out: Path, task: TaskName = "classes") -> tuple[Page, list[str]]:
    """Return the page of a finished federation with these reports, and the lines that the command prints."""
    plan = Plan("f", 7, ModelSpec("mlr", "features", (2,), 2), [0, 1], "fedavg", {}, TrainSettings(), task=task)
    devices = tuple(DeviceRecord(name, name) for name in sorted({row.client for row in rows}))
    settings = {"round": {"rounds": 2}}
    snapshot = Snapshot(settings, plan, Record(round=2, phase=Phase.DONE), devices, (), tuple(rows))
    title, sections, left_out = plots.pages(plots.PictureSource(lambda: snapshot, MemoryBlobs(), "home"), [])
    plots.figures.write(out, title, sections)
    return Page(out / "index.html"), left_out


def test_the_page_begins_with_one_sentence_one_picture_and_one_table(tmp_path: Path) -> None:
    """Expect a mean gain of (0.3 + 0.3 - 0.1) / 3 = 0.167, by hand; 12 against 0 is certain, 0 against 4 is not."""
    rows = [trained("a", 1, 0.1, 0.2), evaluation("a", 12, 0), evaluation("b", 12, 0), evaluation("c", 0, 4)]
    page, _ = page_of(rows, tmp_path)
    first, _, rest = page.text.partition("<h2>Devices</h2>")
    sentence = (
        "Federation helps 2 of 3 devices for certain: on average, the accuracy of what a device keeps is 0.167 higher than "
        "that of the best ordinary model alone (scikit-learn)."
    )
    assert first.count("<p>") == 1 and f"<p>{sentence}</p>" in first
    assert first.index("<p>") < first.index("<img ") < first.index("<table>") and first.count("<img ") == 1
    assert "a paired test" in rest and "What devices keep against the best ordinary model alone" in rest


def test_scores_that_all_sites_withhold_are_said_to_be_withheld(tmp_path: Path) -> None:
    page, left_out = page_of([*withheld("north"), *withheld("south")], tmp_path)
    assert "has a test part" not in " ".join(left_out)
    assert "Not known to the server: 2 of 2 devices withhold their scores from the server (north, south)." in page.text
    assert "fedclient evaluate" in page.text and "model.json" in page.text
    assert page.row("withholds its scores")[1] == "2"
    assert METRICS["epsilon"].heading == "privacy spent", "it only ever rises, so that no direction of its curve is better"
    assert "The papers' figures" not in page.heads, "there are none, so there is no empty table"
    for name in ("clients", "accuracy"):
        [line] = [line for line in left_out if line.startswith(f"no picture '{name}'")]
        assert "2 of 2 devices withhold their scores from the server (north, south)" in line


def test_some_sites_that_withhold_are_named_beside_the_result_of_the_others(tmp_path: Path) -> None:
    page, _ = page_of([evaluation("a", 12, 0), evaluation("b", 12, 0), *withheld("c")], tmp_path)
    assert "Federation helps 2 of 2 devices for certain" in page.text
    assert "1 of 3 devices withhold their scores from the server (c)." in page.text
    assert page.row("withholds its scores")[1] == "1"


ALONE = Report(round=2, work="evaluate", client="a", accuracy_before=0.7, accuracy_kept=0.7, test_samples=40)


@pytest.mark.parametrize(
    ("row", "task", "expected"),
    [
        (ALONE, "classes", "devices had no other model to compare theirs with (fedclient --baseline alone fits one)"),
        (ALONE, "survival", "a C-index is no mean over test samples"),
        (Report(round=2, work="evaluate", client="a", loss=1.0), "classes", "no device has a test part"),
        (trained("a", 1, 0.1, 0.2), "classes", "devices have compared nothing yet: they do after the last round"),
    ],
)
def test_a_page_without_a_result_says_why(row: Report, task: TaskName, expected: str, tmp_path: Path) -> None:
    page, left_out = page_of([row], tmp_path, task)
    assert f"Not known to the server: {expected}" in page.text
    assert any(line.startswith("no picture 'clients': ") and expected in line for line in left_out)
