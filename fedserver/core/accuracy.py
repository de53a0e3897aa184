"""Accuracies and metrics of a federation, from the reports of its devices. Pure code, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum
from statistics import fmean
from typing import Any

from attune.common.methods.method import EvaluatedAs
from attune.common.metrics import METRICS, reported_by
from attune.fedserver.core.records import Report


def accuracies(rows: Iterable[Report], evaluate: EvaluatedAs) -> dict[str, tuple[float, int]]:
    """Return the latest accuracy of each client with the size of its test part.

    An evaluation order does not train, so it reports its one accuracy as `accuracy_before`.

    Args:
        rows: Rows in the order of time.
        evaluate: "served" takes the accuracy of what the server served, before local training; "trained" that of the
            device's model after local training.
    """
    latest: dict[str, tuple[float, int]] = {}
    for row in rows:
        trained = evaluate == "trained" and row.work == "train"
        value = row.accuracy_after if trained else row.accuracy_before
        if value is not None and (evaluate == "served" or trained or row.work == "evaluate"):
            latest[row.client] = (value, row.test_samples or 0)
    return latest


def comparisons(rows: Iterable[Report]) -> dict[str, Report]:
    """Return each client's latest evaluation, in which it compared its model with others. Rows in the order of time."""
    return {row.client: row for row in rows if row.work == "evaluate"}


def latest_metrics(rows: Iterable[Report]) -> dict[str, dict[str, Any]]:
    """Return each client's metrics by name, from its latest training and its latest evaluation.

    If both have a metric, the newer order counts. Rows must be in the order of time.
    """
    latest: dict[tuple[str, str], Report] = {}
    for row in rows:
        latest.pop((row.client, row.work), None)
        latest[row.client, row.work] = row
    metrics: dict[str, dict[str, Any]] = {}
    for (client, _), row in latest.items():
        metrics.setdefault(client, {}).update(reported_by(row))
    return metrics


def mean_metrics(latest: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean over devices of each metric that is a number and that at least one device has.

    latest: the metrics by name of each device, as in `latest_metrics`.
    """
    listed = list(latest)
    values = {name: [m[name] for m in listed if isinstance(m.get(name), int | float)] for name in METRICS}
    return {name: fmean(numbers) for name, numbers in values.items() if numbers}


def over_all(latest: Mapping[str, tuple[float, int]]) -> dict[str, float] | None:
    """Return both averages of the papers: FedMCSA's unweighted mean over clients, and FedTP's over all test samples.

    The order of the clients does not matter, not even for the last digit. None if no client has a test sample.
    """
    total = sum(samples for _, samples in latest.values())
    if not total:
        return None
    return {
        "mean_over_clients": fsum(value for value, _ in latest.values()) / len(latest),
        "over_samples": fsum(value * samples for value, samples in latest.values()) / total,
    }


def constants(rows: Iterable[Report]) -> dict[str, tuple[float, int]]:
    """Return the accuracy of each client's constant answer with the size of its test part, as last reported."""
    return {row.client: (row.accuracy_constant, row.test_samples or 0) for row in rows if row.accuracy_constant is not None}


def no_better_than(constant: Mapping[str, tuple[float, int]], latest: Mapping[str, tuple[float, int]]) -> list[str]:
    """Return the clients whose model scores no better than a constant answer that is not perfect itself."""
    both = sorted(constant.keys() & latest.keys())
    return [name for name in both if latest[name][0] <= constant[name][0] < 1]


def without_use(rows: Iterable[Report], latest: Mapping[str, tuple[float, int]]) -> list[str]:
    """Return the clients whose model is no better than a constant answer, by their numbers or as they say themselves."""
    listed = list(rows)
    said = {client for client, row in comparisons(listed).items() if row.above_constant == 0}
    return sorted({*said, *no_better_than(constants(listed), latest)})


def summary(rows: Iterable[Report], evaluate: EvaluatedAs, metric: str = "accuracy") -> str:
    """Return one line about a round, for the log."""
    listed = list(rows)
    losses = [row.loss for row in listed if row.loss is not None]
    text = f"{len(listed)} answers"
    if losses:
        text += f", loss {sum(losses) / len(losses):.4g}"
    mean = over_all(accuracies(listed, evaluate))
    return f"{text}, {metric} {mean['mean_over_clients']:.4f}" if mean else text
