"""`attune.try_executors`: measurement of the time of a round with each executor, and a recommendation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attune.common.config import by_section, merge
from attune.fedclient.work.executor import PROCESSES, SEQUENTIAL, STACKED
from attune.simulation.arguments import MethodArgument, Shards, data_by_name
from attune.simulation.executors import importable
from attune.simulation.simulate import NO_SETTINGS, simulate

if TYPE_CHECKING:
    from torch import nn

    from attune.simulation.own_models import Factory

ROUNDS = 3  # rounds of a trial; the first one, in which models and data are prepared, does not count
TRIED = (SEQUENTIAL, STACKED, PROCESSES)
TRAINING_ALONE = {"round": {"evaluate_every": 0, "evaluate_each_last": 0}}


@dataclass(frozen=True)
class ExecutorTiming:
    """Measurement of one executor.

    Attributes:
        executor: Name of the executor.
        round_s: Seconds of a round.
        bits: Whether the results have the same bits as over the network.
        one_by_one: Reasons why some work was not stacked.
    """

    executor: str
    round_s: float
    bits: bool
    one_by_one: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """Measurements of all executors, in the order in which they were tried."""

    rows: Sequence[ExecutorTiming]

    @property
    def recommended(self) -> str:
        """Name of the fastest executor."""
        return min(self.rows, key=lambda row: row.round_s).executor

    def __repr__(self) -> str:
        """Return a table and the recommendation."""
        slowest = max(row.round_s for row in self.rows)
        lines = [f"{'executor':<12}{'a round':>10}{'speed':>8}  results"]
        for row in self.rows:
            results = "the bits of the network" if row.bits else "the same to rounding"
            lines.append(f"{row.executor:<12}{row.round_s:>8.3g} s{slowest / row.round_s:>6.1f} x  {results}")
        lines += [f"{row.executor}: some work went one by one: {why}" for row in self.rows for why in row.one_by_one]
        return "\n".join([*lines, f"recommended: executor={self.recommended!r}"])


def try_executors(
    shards: Shards,
    method: MethodArgument | None = None,
    model: str | Factory | nn.Module | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    threads: int = 1,
    workers: int | None = None,
    label: str = "",
    table: Mapping[str, Any] = NO_SETTINGS,
) -> Trial:
    """Train a few rounds with each executor, and return their times. The models are thrown away.

    Arguments and errors are those of `attune.simulate`. Other work on this machine makes the times longer. The executor
    "processes" is left out if other processes cannot import the model.
    """
    settings = merge(by_section(settings), TRAINING_ALONE)
    names = [name for name in TRIED if name != PROCESSES or importable(model)]
    read = {"label": label, "table": table}
    return Trial([_measure(name, shards, method, model, seed, settings, threads, workers, read) for name in names])


def _measure(
    executor: Any,
    shards: Shards,
    method: MethodArgument | None,
    model: Any,
    seed: int | None,
    settings: Mapping[str, Any],
    threads: int,
    workers: int | None,
    read: Mapping[str, Any],
) -> ExecutorTiming:
    answered: list[float] = []
    result = simulate(
        shards, method, model, ROUNDS, seed, settings,
        executor=executor, threads=threads, workers=workers, progress=lambda share: answered.append(time.perf_counter()),
        **read,
    )  # fmt: skip
    devices = len(data_by_name(shards))
    cohort = (len(answered) - devices) // ROUNDS  # all devices evaluate after the last round
    round_s = (answered[ROUNDS * cohort - 1] - answered[cohort - 1]) / (ROUNDS - 1)
    return ExecutorTiming(executor, round_s, executor != STACKED, tuple(result.one_by_one))
