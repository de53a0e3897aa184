"""Single updates from secure sums over other devices, by least squares: how well a server can solve for them in each mode.

`python -m benchmarks.secure_solving --out benchmarks/results/secure_solving.csv`. Eight devices train on full batches, and a
round draws five of them. The server knows who is in each sum, and how many samples each device declares. It takes each device's
update as the same in all rounds, and solves for them. The error is the distance of the estimate from the mean of the device's
real updates, as a share of the latter's norm: the median over the devices, and that of the device that is hit best.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from attune import simulate
from attune.common.exchange.transform import Cohort, DeviceContext, NotASum, PartUpdate, RoundContext
from attune.common.secure.secure_sum import SecureSum
from attune.fedclient.sum_book import SumBook
from attune.fedserver.lab.aggregators.mean import VALUE, Mean

DEVICES, DRAWN, ROUNDS, FEATURES, CLASSES = 8, 5, 20, 12, 3
SECURE = {
    "privacy.secure_aggregation": True, "round.clients": DRAWN, "round.evaluate_each_last": 0,
    "train.batch_size": 4096, "train.local_epochs": 3,
}  # fmt: skip
COLUMNS = ("server", "devices", "sums", "error", "least_error")


@dataclass
class SeenSums:
    """Sums that the server sees, and the real updates behind them.

    Attributes:
        cohorts: The devices of each sum.
        means: The weighted mean change of each sum.
        updates: Real changes of each device.
    """

    cohorts: list[list[str]] = field(default_factory=list)
    means: list[np.ndarray] = field(default_factory=list)
    updates: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def errors(self, samples: Mapping[str, int]) -> np.ndarray:
        """Return the relative error of each device's estimated update, (devices,)."""
        names = sorted(self.updates)
        weights_RD = np.array([[samples[name] if name in cohort else 0.0 for name in names] for cohort in self.cohorts])
        shares_RD = weights_RD / weights_RD.sum(axis=1, keepdims=True)
        solved_DN = np.linalg.lstsq(shares_RD, np.array(self.means), rcond=None)[0]
        real_DN = np.array([np.mean(self.updates[name], axis=0) for name in names])
        return np.asarray(np.linalg.norm(solved_DN - real_DN, axis=1) / np.linalg.norm(real_DN, axis=1))


def watch(stack: ExitStack, seen: SeenSums, spoils: bool) -> None:
    """Note what is handed in and what the server reads. spoils: a device makes each sum one that the server throws away."""
    on_device, on_cohort = SecureSum.on_device, SecureSum.on_cohort

    def handed_in(self: SecureSum, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        before = context.before
        assert before is not None
        seen.updates[update.client].append(flat({name: update.tensors[name] - before[name] for name in update.tensors}))
        return on_device(self, update, context)

    def summed(self: SecureSum, cohort: Cohort, context: RoundContext) -> Cohort:
        done = on_cohort(self, cohort, context)
        if cohort.updates:
            before, total = context.before(cohort.updates[0].client), done.updates[0].tensors
            assert before is not None
            seen.cohorts.append([update.client for update in cohort.updates])
            seen.means.append(flat({name: total[name].double() - before[name].double() for name in before}))
            if spoils:
                raise NotASum("a device that works with the server has spoiled the sum, and takes its numbers off again")
        return done

    stack.enter_context(patch.object(SecureSum, "on_device", handed_in))
    stack.enter_context(patch.object(SecureSum, "on_cohort", summed))


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])


def stands_still(self: Mean, name: str, mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """Serve one value again and again, in the place of Mean.apply."""
    return {VALUE: self._vault.read(VALUE)[name]}


def changes_last_bits(self: Mean, name: str, mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """Serve one value again and again, with other last bits."""
    value = self._vault.read(VALUE)[name]
    return {VALUE: torch.nextafter(value, torch.full_like(value, torch.inf))}


@dataclass(frozen=True)
class SolvingAttempt:
    """Attempt of a server. apply: in the place of Mean.apply; forgets: devices have no memory of sums."""

    server: str
    devices: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    apply: Any = None
    forgets: bool = False
    spoils: bool = False


TINY = {"train.lr": 1e-6, "privacy.secure_clip": 1e-5}
SAME = {"privacy.same_cohort": True}
ATTEMPTS = (
    SolvingAttempt("serves one value again", "without memory of sums", apply=stands_still, forgets=True),
    SolvingAttempt("serves one value again", "as they are", apply=stands_still),
    SolvingAttempt("follows the protocol, server_mix = 1", "as they are"),
    SolvingAttempt("follows the protocol, server_mix = 0.1", "as they are", {"method.server_mix": 0.1}),
    SolvingAttempt("follows the protocol, train.lr = 1e-6", "as they are", TINY),
    SolvingAttempt("has a device spoil each sum", "as they are", spoils=True),
    SolvingAttempt("changes the last bits alone", "as they are", apply=changes_last_bits),
    SolvingAttempt("changes the last bits alone", "with privacy.same_cohort", SAME, changes_last_bits),
    SolvingAttempt("follows the protocol, train.lr = 1e-6", "with privacy.same_cohort", TINY | SAME),
)


def shards() -> Mapping[str, tuple[np.ndarray, ...]]:
    """Return the data of each device: one task, and another number of samples for each."""
    draws = np.random.default_rng(0)
    true_CF, made = draws.normal(size=(CLASSES, FEATURES)), dict[str, tuple[np.ndarray, ...]]()
    for number in range(DEVICES):
        size = int(draws.integers(40, 90))
        y = draws.integers(0, CLASSES, size + 20)
        x = (true_CF[y] + draws.normal(size=(size + 20, FEATURES))).astype("float32")
        made[f"device{number}"] = (x[:size], y[:size], x[size:], y[size:])
    return made


def tried(attempt: SolvingAttempt, rounds: int) -> dict[str, str]:
    """Return the row of one attempt."""
    seen, devices = SeenSums(), shards()
    with ExitStack() as stack:
        watch(stack, seen, attempt.spoils)
        if attempt.apply is not None:
            stack.enter_context(patch.object(Mean, "apply", attempt.apply))
        if attempt.forgets:
            stack.enter_context(patch.object(SumBook, "refuses", lambda *asked: ""))
        settings = SECURE | dict(attempt.settings)
        simulate(devices, "fedavg", "mlr", rounds, 0, settings, progress=False)
    errors = seen.errors({name: len(data[0]) for name, data in devices.items()})
    figures = (len(seen.means), f"{np.median(errors):.3g}", f"{errors.min():.3g}")
    return dict(zip(COLUMNS, (attempt.server, attempt.devices, *map(str, figures)), strict=True))


@click.command()
@click.option("--rounds", default=ROUNDS, show_default=True, help="Rounds of each attempt.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(rounds: int, out: Path) -> None:
    """Try each way, and write a table."""
    torch.set_num_threads(1)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for attempt in ATTEMPTS:
            row = tried(attempt, rounds)
            print(row)
            writer.writerow(row)


if __name__ == "__main__":
    main()
