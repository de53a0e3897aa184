"""Accuracies by hand."""

from collections.abc import Sequence

import pytest

from attune.common.config import RoundSettings
from attune.fedserver.core.accuracy import accuracies, comparisons, latest_metrics, no_better_than, summary
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import Report
from attune.fedserver.view.homes import render_status
from attune.fedserver.view.status import state_of
from tests.fedserver.view.test_summary import train


def evaluate(round_, client, value, size=10):
    return Report(round=round_, work="evaluate", client=client, accuracy_before=value, test_samples=size)


ROWS = [train(1, "a", 0.1, 0.5), train(1, "b", 0.2, 0.6, 30), train(2, "a", 0.3, 0.7), evaluate(2, "b", 0.9, 30)]


def test_served_is_before_local_training_and_the_latest_counts():
    assert accuracies(ROWS, "served") == {"a": (0.3, 10), "b": (0.9, 30)}
    assert accuracies(ROWS[:3], "served") == {"a": (0.3, 10), "b": (0.2, 30)}


def test_trained_is_after_local_training_or_of_the_last_evaluation():
    assert accuracies(ROWS, "trained") == {"a": (0.7, 10), "b": (0.9, 30)}
    assert accuracies(ROWS[:3], "trained") == {"a": (0.7, 10), "b": (0.6, 30)}


def test_who_is_no_better_than_a_constant_answer():
    """Leave out d, which has only one class, so that no model could be better, and e, whose constant answer is not known."""
    latest = {"a": (0.5, 10), "b": (0.51, 10), "c": (0.2, 5), "d": (1.0, 10), "e": (0.0, 10)}
    assert no_better_than({"a": (0.5, 10), "b": (0.5, 10), "c": (0.3, 5), "d": (1.0, 10)}, latest) == ["a", "c"]


def test_a_comparison_is_the_latest_evaluation():
    rows = [evaluate(1, "a", 0.1), train(2, "a", 0.3, 0.7), evaluate(2, "a", 0.4), train(3, "b", 0.1, 0.2)]
    assert comparisons(rows) == {"a": rows[2]}


def test_the_latest_of_each_metric_is_of_the_latest_training_or_evaluation():
    compared = Report(round=2, work="evaluate", client="a", accuracy_before=0.4, accuracy_common=0.2, kept="common")
    rows = [train(1, "a", 0.1, 0.5), compared, Report(round=3, work="train", client="a", loss=1.5, accuracy_before=0.6)]
    assert latest_metrics(rows) == {"a": {"loss": 1.5, "accuracy_before": 0.6, "accuracy_common": 0.2, "kept": "common"}}
    later = Report(round=4, work="evaluate", client="a", accuracy_before=0.7)
    assert latest_metrics([*rows, later]) == {"a": {"loss": 1.5, "accuracy_before": 0.7}}, "it compared with nothing"


def shown(
    accuracy: float,
    constant: float | None,
    no_better: list[str],
    clients: Sequence[dict] = (),
    privacy: dict | None = None,
) -> list[str]:
    """Return the last lines of a status whose averages are `accuracy` over clients, and a tenth more over samples."""
    both = {"mean_over_clients": accuracy, "over_samples": accuracy + 0.1}
    of_constant = None if constant is None else {"mean_over_clients": constant, "over_samples": constant}
    said = {
        "state": "done", "round": 1, "rounds": 1, "method": "fedavg", "running": False, "paused": False,
        "metric": "accuracy",
    }  # fmt: skip
    said |= dict.fromkeys(("buffer", "reason", "setback", "standardisation", "closed_form", "one_token"))
    said |= {key: [] for key in ("troubles", "todo", "expiring", "refused", "taken_back", "awaited", "adapting", "fleet")}
    said |= {"privacy": privacy, "clients": list(clients), "accuracy": both, "constant": of_constant}
    return render_status(said | {"no_better_than_constant": no_better}).splitlines()[2:]


def test_status_says_where_models_are_no_better_than_a_constant_answer():
    assert shown(0.8, None, []) == ["accuracy: 0.8000 mean over clients, 0.9000 over samples"]
    assert shown(0.8, 0.5, [])[1:] == ["a constant answer: 0.5000 mean over clients, 0.5000 over samples"]
    assert shown(0.8, 0.85, ["a"])[2:] == [
        "no better than a constant answer over clients: these models have learned nothing useful",
        "on 1 of 0 devices the model is no better than a constant answer",
    ]
    assert "over clients and over samples" in shown(0.8, 0.9, [])[2]


def test_status_says_of_each_device_whether_its_model_is_better():
    client = dict.fromkeys(("progress", "interval", "accuracy_common", "accuracy_local", "accuracy_constant", "note", "kept"))
    client |= {"name": "kiel", "state": "done", "samples": 9, "accuracy": 0.5, "verdict": "worse", "probably": "harmed"}
    [row] = [line for line in shown(0.5, None, [], [client]) if line.startswith("kiel")]
    assert row.split()[-3:] == ["worse", "harmed", "-"], "and nothing is kept yet"


def test_status_says_what_privacy_has_cost():
    spent = {"unit": "example", "epsilon": 4.0, "delta": 1e-5, "spent": 1.2345, "mode": "noise", "visible": "no data"}
    assert "privacy: by example, epsilon with a budget of 4 at delta 1e-05; at most 1.23 spent by a device" in shown(
        0.8, None, [], privacy=spent
    )
    unlimited = shown(0.8, None, [], privacy=spent | {"epsilon": None, "spent": None})
    assert "privacy: by example, epsilon with no budget at delta 1e-05; nothing spent yet" in unlimited
    assert "  noise: no data" in unlimited and not any("warning: ann" in line for line in unlimited)
    assert any("warning: ann reported less spent" in line for line in shown(0.8, None, [], privacy=spent | {"fallen": ["ann"]}))


def test_one_line_about_a_round():
    rows = [Report(round=1, work="train", client="a", loss=1.0), Report(round=1, work="train", client="b", loss=2.0)]
    assert summary(rows, "served") == "2 answers, loss 1.5"
    assert summary(ROWS[:2], "served") == "2 answers, accuracy 0.1500"


@pytest.mark.parametrize(
    ("connected", "reported", "served", "expected"),
    [
        ({"a", "b"}, set(), True, "training"),
        ({"a"}, set(), True, "waiting"),  # one of three sampled devices is connected: the quorum of two cannot be reached
        ({"a"}, {"b"}, True, "training"),
        ({"x", "y"}, set(), True, "waiting"),  # devices outside the sample do not help
        (set(), set(), False, "training"),  # a stopped server waits for no device
    ],
)
def test_training_that_cannot_reach_its_quorum_is_waiting(connected, reported, served, expected):
    record = Record(phase=Phase.TRAINING, devices=("a", "b", "c"), cohort=("a", "b", "c"))
    assert state_of(record, connected, reported, RoundSettings(min_clients=2), served=served) == expected


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.AGGREGATING, Phase.DONE, Phase.FAILED])
def test_other_phases_are_said_as_they_are(phase):
    assert state_of(Record(phase=phase), set(), set(), RoundSettings(), served=True) == str(phase)
