"""Overhead of a simulated round: CPU time and calls per device and round, compared with training and evaluating alone.

`python -m benchmarks.simulation_overhead`: 100 devices with 150 samples each take 20 steps of 20 samples of MLR 60 x 10
each round, and evaluate before and after. "Alone", the same trainers do the same work in a loop, without orders, blobs and
aggregation. Times are CPU times of the process on one thread, the best of several, with both ways in turn.

Calls are those of functions of Python and of C (sys.setprofile) with the stacked executor, by module, and those of the stacked
training apart. They depend on no other work of the machine: `--repeats 0` counts them alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch

import attune
from attune.common.config import TrainSettings
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.common.seeds import derive
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import alone as computed
from attune.fedclient.work.learner import Learner, make_learner
from attune.fedclient.work.orders import MemoryOrders
from attune.fedclient.work.stacked.descend import descend
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.federation import NOWHERE
from benchmarks.machine import machine

DEVICES, SAMPLES, FEATURES, CLASSES, STEPS, BATCH = 100, 200, 60, 10, 20, 20
ROUNDS = 5  # rounds of one measurement
FEWER = 20  # devices with images
SHOWN = 25  # modules whose calls are written down
RESULTS = Path("benchmarks/results")
TRAIN: dict[str, Any] = {"local_steps": STEPS, "batch_size": BATCH, "validation": 0.0}
SETTINGS = {"train": TRAIN, "round": {"evaluate_each_last": 0}}
Data = dict[str, tuple[np.ndarray, np.ndarray]]


def data() -> Data:
    """Make data of a linear rule with ten classes; a quarter of the samples is held out for testing."""
    rule = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    found = {}
    for number in range(DEVICES):
        x = np.random.default_rng(number).normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        found[f"device{number:03}"] = (x, (x @ rule).argmax(axis=1))
    return found


def simulate(shards: Data, method: str, model: str, rounds: int, executor: Any) -> None:
    attune.simulate(shards, method, model, rounds, settings=SETTINGS, executor=executor, progress=False, baseline="none")


def simulated(shards: Data, method: str, executor: Any) -> float:
    """Return the CPU seconds of a round: those of a simulation of some rounds, less those of a single round."""

    def run(rounds: int) -> float:
        began = time.process_time()
        simulate(shards, method, "mlr", rounds, executor)
        return time.process_time() - began

    return (run(1 + ROUNDS) - run(1)) / ROUNDS


class CallCounter:
    """Counter of calls by module, for threading.setprofile; those of the stacked training are under "training"."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._training = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code is descend.__code__:
            self._training += 1
        if event in ("call", "c_call"):
            self.calls["training" if self._training else frame.f_globals.get("__name__", "")] += 1
        elif event == "return" and code is descend.__code__:
            self._training -= 1


def counted(shards: Data, method: str, model: str, rounds: int) -> dict[str, float]:
    """Return the calls of a device and round by module: those of `rounds` further rounds, after a first one."""

    def calls(number: int) -> Counter[str]:
        counter = CallCounter()
        threading.setprofile(counter)  # the simulation has a thread of its own
        try:
            simulate(shards, method, model, number, "stacked")
        finally:
            threading.setprofile(None)
        return counter.calls

    simulate(shards, method, model, 1, "stacked")
    first, all_calls = calls(1), calls(1 + rounds)
    each = {module: (count - first[module]) / len(shards) / rounds for module, count in all_calls.items()}
    return dict(sorted(each.items(), key=lambda item: -item[1]))


def shown(calls: dict[str, float]) -> dict[str, Any]:
    """Return the sums of calls, and those of the modules that have the most."""
    beyond = {module: number for module, number in calls.items() if module != "training"}
    modules = {module: round(number, 1) for module, number in list(beyond.items())[:SHOWN]}
    return {"training": round(calls["training"]), "beyond_training": round(sum(beyond.values())), "modules": modules}


def alone(learners: list[Learner]) -> float:
    """Return the CPU seconds of a round in which the trainers do their work, but hand in no updates."""
    began = time.process_time()
    for round_ in range(ROUNDS):
        for learner in learners:
            seeds = lambda purpose, name=learner.name, round_=round_: derive(0, name, round_, purpose)  # noqa: E731
            held, trainer = learner.data, learner.trainer
            trainer.evaluate(learner.state.theta, held.test_x, held.test_y)
            trained = computed(trainer.training(learner.state.theta, learner.state.received, held.train_x, held.train_y, seeds))
            trainer.evaluate(trained.tensors, held.test_x, held.test_y)
    return (time.process_time() - began) / ROUNDS


def learners(shards: Data) -> list[Learner]:
    plan = Plan(
        "f",
        0,
        default_spec("tabular", (FEATURES,), CLASSES, 0, "mlr", {}),
        list(range(CLASSES)),
        "fedavg",
        {},
        TrainSettings(**TRAIN),
    )
    options = DeviceOptions(Path(), NOWHERE, device="cpu")
    return [make_learner(plan, shard, name, MemoryOrders, options) for name, shard in read_shards(data_by_name(shards)).items()]


@click.command()
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "simulation_overhead.json", show_default=True)
def main(repeats: int, out: Path) -> None:
    """Measure and write milliseconds of CPU time for each device and round."""
    torch.set_num_threads(1)
    shards, found = data(), {"machine": machine()}
    images = {name: (x[:, :48].reshape(-1, 4, 4, 3) / 10 + 0.5, y) for name, (x, y) in list(shards.items())[:FEWER]}
    counts = {"fedavg, mlr": counted(shards, "fedavg", "mlr", ROUNDS), "fedtp, vit": counted(images, "fedtp", "vit", 2)}
    found["calls_a_device_and_round"] = {name: shown(calls) for name, calls in counts.items()}
    for name, calls in found["calls_a_device_and_round"].items():
        click.echo(f"{name:<32} {calls['beyond_training']:7d} calls of a device and round beyond training")
    ready = learners(shards)
    ways: dict[str, Callable[[], float]] = {"training and evaluating alone": lambda: alone(ready)}
    for method in ("fedavg", "fedmcsa"):
        for executor in ("sequential", "stacked"):
            ways[f"{method}, {executor}"] = partial(simulated, shards, method, executor)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            best[name] = min(best[name], way() / DEVICES * 1000)
    floor = best["training and evaluating alone"]
    for name, each in best.items() if repeats else ():
        beyond = f"  beyond training {each - floor:6.3f}" if name.endswith("sequential") else ""
        click.echo(f"{name:<32} {each:7.3f} ms a device and round{beyond}")
    if repeats:
        found["ms_a_device_and_round"] = {name: round(each, 3) for name, each in best.items()}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
