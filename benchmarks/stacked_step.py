"""The stacked step of many devices, computed in different ways, in one run on one thread.

`python -m benchmarks.stacked_step`: the devices of benchmarks.stacked train with the product's own gradients ("own"), with the
same torch operations recorded once and replayed without vmap and autograd ("traced"), and with those compiled by torch.compile
("compiled", and "compiled again" from the build of the first time). All take the same batches, in turn. Times are CPU times of
the whole training, medians; the wall time of recording and compiling is given separately. The difference is the largest one of
a weight, in largest weights of its tensor.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import msgspec
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attune.common.plan import ModelSpec
from attune.fedclient.work.objectives.base import Batch, Tensors, Trained
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.stacked import descend
from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks.machine import machine
from benchmarks.stacked import CASES, Device, cpu_s

Gradients = Callable[[Descent, Tensors, Tensors, Batch], tuple[Tensors, Tensor]]
OWN = "own"
MODELS = ("MLR 60 x 10", "DNN 60-20-10")


class Recorded:
    """The product's gradients, recorded at the first step of each shape and replayed at the others.

    Args:
        compiled: Whether torch.compile makes the code from what was recorded.
    """

    def __init__(self, compiled: bool) -> None:
        self._compiled, self._plain = compiled, descend.gradients_of
        self._made: dict[Any, Callable[..., tuple[Tensors, Tensor]]] = {}
        self.made_s = 0.0

    def __call__(self, job: Descent, tensors: Tensors, beside: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        key = tuple(tensor.shape for tensor in (*tensors.values(), *beside.values(), batch.x))
        if key not in self._made:
            began = time.perf_counter()
            self._made[key] = self._make(job, tensors, beside, batch)
            self.made_s += time.perf_counter() - began
        return self._made[key](tensors, beside, *batch)

    def _make(self, job: Descent, *given: Any) -> Callable[..., tuple[Tensors, Tensor]]:
        def gradients(tensors: Tensors, beside: Tensors, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensors, Tensor]:
            return self._plain(job, dict(tensors), dict(beside), Batch(x, y, weight))

        tensors, beside, batch = given
        step: Callable[..., tuple[Tensors, Tensor]] = make_fx(gradients)(tensors, beside, *batch)
        if self._compiled:
            step = torch.compile(step)
            step(tensors, beside, *batch)  # compiles
        return step


def trained(devices: list[Device], gradients: Gradients) -> list[Trained]:
    """Train the devices in one stack from their first weights."""
    stacked = Stacked()
    with patch.object(descend, "gradients_of", gradients):
        found = stacked.run([each.training() for each in devices])
    assert not stacked.reasons, stacked.reasons
    return [each for each in found if isinstance(each, Trained)]


def difference(one: list[Trained], other: list[Trained]) -> float:
    """Return the largest difference of a weight, in largest weights of its tensor; 0 for the same bits."""
    pairs = [(a.tensors[name], b.tensors[name]) for a, b in zip(one, other, strict=True) for name in a.tensors]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def measure(model: ModelSpec, ways: Mapping[str, Gradients], devices: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each way: what it cost to make, its training time, the ratio to the own one's, and the difference."""
    made = [Device(model, number) for number in range(devices)]
    first = {name: trained(made, way) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken[name].append(cpu_s(lambda way=way: trained(made, way)))  # type: ignore[misc]
    return [
        {
            "way": name,
            "made_s": round(way.made_s if isinstance(way, Recorded) else 0.0, 2),
            "train_ms": round(1e3 * median(taken[name]), 1),
            "times_own": round(median(mine / own for mine, own in zip(taken[name], taken[OWN], strict=True)), 2),
            "difference": float(f"{difference(first[OWN], first[name]):.2g}"),
        }
        for name, way in ways.items()
    ]


@click.command()
@click.option("--devices", default=100, show_default=True)
@click.option("--repeats", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "stacked_step.json")
def main(devices: int, repeats: int, out: Path) -> None:
    """Measure on one thread, and write the figures."""
    torch.set_num_threads(1)
    cases = []
    with tempfile.TemporaryDirectory(prefix="attune-compiled-") as builds:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = builds  # empty at first; what is compiled again finds its build there
        for name in MODELS:
            ways: dict[str, Gradients] = {OWN: descend.gradients_of, "traced": Recorded(compiled=False)}
            ways |= {way: Recorded(compiled=True) for way in ("compiled", "compiled again")}
            for row in measure(CASES[name], ways, devices, repeats):
                cases.append({"model": name} | row)
                click.echo(msgspec.json.encode(cases[-1]).decode())
    report = {"what": __doc__.split("\n")[0], "devices": devices, "machine": machine(), "cases": cases}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
