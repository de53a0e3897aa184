"""A training step of the ViT of FedTP's reduced tables, computed in different ways, in one run on one thread.

The ways are the product's own, attention by torch's fused kernel, the forward pass in bfloat16, and the compiled model. All
start from the same weights, and see the same batch of B images. Times are CPU times, medians of steps taken in turn. The cost
that occurs once (compiling) is given separately.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import MethodType
from typing import Any

import click
import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from attune.common.models.blocks import SelfAttention
from attune.common.models.registry import build
from attune.common.plan import ModelSpec
from benchmarks.machine import machine
from benchmarks.mcsa import cpu_s

OPTIONS = {"patch": 8, "width": 64, "depth": 3, "heads": 4, "dropout": 0.0}
OWN = "explicit"
Step = Callable[[], Tensor]  # takes one training step, and returns its loss


def fused(self: SelfAttention, x_BTD: Tensor) -> Tensor:
    """Compute SelfAttention.forward with scaled_dot_product_attention."""
    batch, steps, _ = x_BTD.shape
    q_BHTE, k_BHTE, v_BHTE = self._split(self.to_qkv(x_BTD))
    mixed_BHTE = scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=self.causal)
    out_BTD: Tensor = self.dropout(self.to_out(mixed_BHTE.transpose(1, 2).reshape(batch, steps, -1)))
    return out_BTD


def with_fused(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.forward = MethodType(fused, module)  # type: ignore[method-assign]
    return model


def steps(batch: int) -> Mapping[str, Step]:
    """Return each way with a model of its own."""
    draw = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(batch, 3, 32, 32, generator=draw)
    y_B = torch.randint(10, (batch,), generator=draw)
    spec = ModelSpec("vit", "images", (32, 32, 3), 10, options=OPTIONS)

    def way(change: Callable[[nn.Module], Any] = lambda model: model, bf16: bool = False) -> Step:
        model = build(spec, seed=0)
        computed = change(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)

        def step() -> Tensor:
            optimiser.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = cross_entropy(computed(x_BCHW), y_B)
            loss.backward()
            optimiser.step()
            return loss.detach()

        return step

    return {OWN: way(), "fused": way(with_fused), "bfloat16": way(bf16=True), "compiled": way(torch.compile)}


def wall_s(work: Callable[[], object]) -> float:
    """Return the wall time of some work. It is used for compiling, which runs in other threads and processes too."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(batch: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each way: its loss at the second step, the time of a step, and the ratio to the product's time."""
    ways = steps(batch)
    once_s = {name: wall_s(step) for name, step in ways.items()}
    second = {name: float(step()) for name, step in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            taken[name].append(cpu_s(step))
    return [
        {
            "way": name,
            "loss": round(second[name], 4),
            "first_step_s": round(once_s[name], 3),
            "step_ms": round(1e3 * median(taken[name]), 2),
            "times_explicit": round(median(mine / own for mine, own in zip(taken[name], taken[OWN], strict=True)), 2),
        }
        for name in ways
    ]


@click.command()
@click.option("--batch", default=64, show_default=True)
@click.option("--repeats", default=40, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file (default: only print it).")
def main(batch: int, repeats: int, out: Path | None) -> None:
    """Measure all ways on one thread."""
    torch.set_num_threads(1)
    cases = measure(batch, repeats)
    for case in cases:
        click.echo(msgspec.json.encode(case).decode())
    if out is not None:
        command = f"python -m benchmarks.vit_step {' '.join(sys.argv[1:])}".strip()
        what = "CPU milliseconds of a training step on one thread, medians; ratios within one turn"
        report = {"command": command, "what": what, "machine": machine(), "cases": cases}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
