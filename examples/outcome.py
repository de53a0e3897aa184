"""Table of the demo's results: a row for each device, both kinds of mean, and the best model of each device."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from attune.common.statistics import mcnemar

COLUMNS = {
    "constant": "constant", "alone": "alone", "local": "Local", "fedavg": "FedAvg", "fedavg+ft": "tuned",
    "analytic": "analytic", "fedtp": "FedTP", "kept": "kept",
}  # fmt: skip
LEGEND = {
    "constant": "always the device's most frequent label",
    "alone": "the best ordinary model of scikit-learn, which each device chooses on its own training samples",
    "local": "FedTP's network, trained alone with the same budget",
    "fedavg": "one model for all",
    "fedavg+ft": "that model, trained on each device for 20 epochs at rate 0.1",
    "analytic": "a regression from sums of all devices, drawn towards each device's own samples: one exchange",
    "fedtp": "own weights for each device, from the server",
    "kept": "what FedTP's devices predict with in the end, a blend of their models",
}


@dataclass(frozen=True)
class Outcome:
    """Result of one device: its accuracy by those of COLUMNS that it has, as fractions of its own test part."""

    name: str
    samples: int
    test_samples: int
    accuracy: Mapping[str, float]
    home: Path
    verdict: str | None = None  # verdict of the paired test on what it keeps

    @property
    def best(self) -> str:
        """Name of the column whose model finds most of the test labels; "equal" if several do. FedTP's is a part of kept."""
        rivals = {key: value for key, value in self.accuracy.items() if key not in ("constant", "fedtp")}
        first = [key for key, value in rivals.items() if value == max(rivals.values())]
        return COLUMNS[first[0]] if len(first) == 1 else "equal"


def columns_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return those of COLUMNS that all devices have."""
    return [key for key in COLUMNS if all(key in outcome.accuracy for outcome in outcomes)]


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a row for each device as a CSV file, from which README takes its figures (benchmarks/results/demo.csv)."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        columns = columns_of(outcomes)
        rows.writerow(("device", "samples", "test_samples", *columns, "verdict"))
        for outcome in outcomes:
            shares = [f"{outcome.accuracy[key]:.6f}" for key in columns]
            rows.writerow((outcome.name, outcome.samples, outcome.test_samples, *shares, outcome.verdict))


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the table."""
    columns = columns_of(outcomes)
    width = max(len("over all test samples"), *(len(outcome.name) for outcome in outcomes))
    yield "accuracy on each device's own test data"
    yield _row("device", "train", "test", [COLUMNS[key] for key in columns], "best", width)
    for outcome in outcomes:
        shown = _shown(outcome.accuracy, columns)
        yield _row(outcome.name, outcome.samples, outcome.test_samples, shown, outcome.best, width)
    total = sum(outcome.test_samples for outcome in outcomes)
    means = {key: fmean(outcome.accuracy[key] for outcome in outcomes) for key in columns}
    pooled = {key: sum(outcome.accuracy[key] * outcome.test_samples for outcome in outcomes) / total for key in columns}
    yield _row("mean over devices", "", "", _shown(means, columns), "", width)
    yield _row("over all test samples", sum(outcome.samples for outcome in outcomes), total, _shown(pooled, columns), "", width)
    count = Counter(outcome.best for outcome in outcomes)
    yield f"finds most labels: {', '.join(f'{name} on {number} devices' for name, number in count.most_common())}"
    for key in (key for key in columns if key not in ("constant", "fedtp", "kept")):
        gains = [outcome.accuracy["kept"] - outcome.accuracy[key] for outcome in outcomes]
        ahead, behind = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        p = mcnemar(ahead, behind)
        yield f"what is kept is ahead of {COLUMNS[key]} on {ahead} devices, behind on {behind} (sign test, p = {p:.2g})"
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    yield (
        "for a single device, by its own few test samples, what is kept is "
        f"better on {verdicts['better']}, worse (harmed) on {verdicts['worse']}, too close to tell on {verdicts['unclear']}"
    )
    yield from (f"{COLUMNS[key]}: {LEGEND[key]}" for key in columns)


def _shown(accuracies: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{accuracies[key]:.3f}" for key in columns]


def _row(name: str, train: object, test: object, cells: Iterable[str], best: str, width: int) -> str:
    return f"{name:<{width}} {train:>6} {test:>5} {' '.join(f'{cell:>9}' for cell in cells)}  {best}".rstrip()
