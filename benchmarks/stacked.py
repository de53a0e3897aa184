"""Many devices trained at once compared with one after the other, on one thread: where stacking pays, and where not.

`python -m benchmarks.stacked`: 100 devices with 200 samples each take 20 steps of 20 samples, with momentum and clipping; then
all are evaluated on 60 samples each. Times are CPU times of the thread, the best of several, with both ways in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import ModelSettings, SgdSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Kind, ModelSpec
from attune.common.seeds import derive
from attune.fedclient.work.executor import Jobs, alone
from attune.fedclient.work.objectives.base import Trained
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.stacked.lockstep import Stacked
from attune.fedclient.work.trainer import Trainer
from benchmarks.machine import machine

DEVICES, SAMPLES, TESTED, STEPS, BATCH, CLASSES = 100, 200, 60, 20, 20, 10


def spec(kind: Kind, shape: tuple[int, ...], name: str, **options: Any) -> ModelSpec:
    return default_spec(kind, shape, CLASSES, 0, name, options)


CASES = {
    "MLR 60 x 10": spec("tabular", (60,), "mlr"),
    "DNN 60-20-10": spec("tabular", (60,), "dnn", hidden=[20]),
    "MLR 784 x 10": spec("images", (28, 28, 1), "mlr"),
    "DNN 784-100-10": spec("images", (28, 28, 1), "dnn", hidden=[100]),
    "ViT, 2 blocks of width 32": spec("images", (16, 16, 1), "vit", depth=2, width=32, heads=2, dropout=0.0),
}


class Device:
    """Samples and initial weights of one device."""

    def __init__(self, model: ModelSpec, number: int) -> None:
        settings = TrainSettings(batch_size=BATCH, local_steps=STEPS)
        network = build(model, 0)
        self.trainer = Trainer(
            network, Sgd(SgdSettings()), PlainPredictor(ModelSettings()), settings, torch.device("cpu"), family=model.name
        )
        draw = torch.Generator().manual_seed(number)
        *sides, last = model.shape
        shape = (last, *sides) if sides else (last,)
        self.x, self.y = torch.randn(SAMPLES, *shape, generator=draw), torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        self.start, self.number = tensors_of(network), number

    def training(self) -> Jobs[Trained]:
        return self.trainer.training(self.start, {}, self.x, self.y, lambda purpose: derive(self.number, purpose))

    def evaluation(self) -> Jobs[torch.Tensor]:
        return self.trainer.right(self.start, self.x[:TESTED], self.y[:TESTED])


def cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(model: ModelSpec, devices: int, repeats: int) -> dict[str, Any]:
    """Measure the seconds of both ways, and their ratio."""
    made, stacked = [Device(model, number) for number in range(devices)], Stacked()
    ways: dict[str, Callable[[], object]] = {
        "train_one_by_one_s": lambda: [alone(each.training()) for each in made],
        "train_stacked_s": lambda: stacked.run([each.training() for each in made]),
        "evaluate_one_by_one_s": lambda: [alone(each.evaluation()) for each in made],
        "evaluate_stacked_s": lambda: stacked.run([each.evaluation() for each in made]),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, work in ways.items():
            best[name] = min(best[name], cpu_s(work))
    assert not stacked.reasons, stacked.reasons
    return {
        "devices": devices,
        "weights": sum(tensor.numel() for tensor in made[0].start.values()),
        **{name: round(seconds, 4) for name, seconds in best.items()},
        "train_times_faster": round(best["train_one_by_one_s"] / best["train_stacked_s"], 2),
        "evaluate_times_faster": round(best["evaluate_one_by_one_s"] / best["evaluate_stacked_s"], 2),
    }


@click.command()
@click.option("--devices", default=DEVICES)
@click.option("--repeats", default=5)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "stacked.json")
def main(devices: int, repeats: int, out: Path) -> None:
    """Measure on one thread, and write the figures."""
    torch.set_num_threads(1)
    cases = []
    for name, model in CASES.items():
        cases.append({"model": name} | measure(model, devices, repeats))
        click.echo(msgspec.json.encode(cases[-1]).decode())
    report = {
        "what": "training and evaluating many devices one by one and stacked; CPU seconds of one thread, best of several",
        "steps": STEPS,
        "batch": BATCH,
        "repeats": repeats,
        "machine": machine(),
        "cases": cases,
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
