"""Cost of a training step with noise on the device, as a multiple of a plain one, on one thread.

`python -m benchmarks.private_step`. A device with 960 samples trains with batches of 32, with momentum: plainly, with ghost
norms and clipping alone, and with noise too. All ways take the same number of steps. Times are CPU times of the thread, medians
of repeats with all ways in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import click
import msgspec
import torch

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import SgdSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.common.seeds import derive
from attune.fedclient.work.objectives.base import LocalTask, Network
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.private.noisy_steps import OrderNoise
from benchmarks.machine import machine
from benchmarks.mcsa import cpu_s

SAMPLES, BATCH, STEPS, CLASSES = 960, 32, 100, 10


def spec(inputs: int, name: str, hidden: list[int]) -> ModelSpec:
    return default_spec("tabular", (inputs,), CLASSES, 0, name, {"hidden": hidden} if hidden else {})


CASES = {
    "MLR 64 x 10": spec(64, "mlr", []),
    "MLR 784 x 10": spec(784, "mlr", []),
    "DNN 64-100-10": spec(64, "dnn", [100]),
    "DNN 784-100-10": spec(784, "dnn", [100]),
}


def ways(model: ModelSpec) -> Mapping[str, LocalTask]:
    """Return the task of one device for each way to train."""
    draw = torch.Generator().manual_seed(0)
    module = build(model, 0)
    start = tensors_of(module)
    plain = LocalTask(
        network=Network(module),
        start=start,
        received=start,
        x=torch.randn(SAMPLES, *model.shape, generator=draw),
        y=torch.randint(0, CLASSES, (SAMPLES,), generator=draw),
        settings=TrainSettings(batch_size=BATCH, local_steps=STEPS),
        seeds=lambda purpose: derive(0, purpose),
        device=torch.device("cpu"),
        kinds=dict.fromkeys(start, "shared"),
    )
    noise = OrderNoise(clip=1.0, noise=0.0, key=bytes(32), charged=1 << 60)
    return {
        "plain": plain,
        "clipped": replace(plain, noise=noise),
        "private": replace(plain, noise=replace(noise, noise=1.0)),
    }


def measure(model: ModelSpec, repeats: int) -> dict[str, float]:
    """Measure the seconds of a step in each way, and their ratios to the plain one."""
    objective, tasks = Sgd(SgdSettings()), ways(model)
    for task in tasks.values():
        objective.run(task)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            times[name].append(cpu_s(lambda task=task: objective.run(task)) / STEPS)  # type: ignore[misc]
    step = {name: median(values) for name, values in times.items()}
    row = {f"{name}_ms": round(1e3 * seconds, 4) for name, seconds in step.items()}
    row |= {f"{name}_ratio": round(step[name] / step["plain"], 2) for name in ("clipped", "private")}
    return row | {"values": sum(math.prod(tensor.shape) for tensor in tasks["plain"].start.values())}


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Repeatable. Default: all.")
@click.option("--out", type=click.Path(path_type=Path))
def main(repeats: int, cases: tuple[str, ...], out: Path | None) -> None:
    """Measure a private step, and print it as JSON."""
    torch.set_num_threads(1)
    rows = {name: measure(CASES[name], repeats) for name in cases or tuple(CASES)}
    result = {"machine": machine(), "batch": BATCH, "steps": STEPS, "repeats": repeats, "cases": rows}
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
