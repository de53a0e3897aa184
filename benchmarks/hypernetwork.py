"""A step of FedTP's hypernetwork at its published size, compared with the bytes that it must touch, in one run.

S clients hand in changes of W generated weights (8 blocks, 1.57 M). The network has 151 W weights (237.5 M). A step must read
and write every weight and every moment once: 16 bytes per weight for SGD with momentum, 24 for Adam. The roof is the time in
which memory is copied for as many bytes. Times are CPU times of one thread; each is the best of several, taken in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from benchmarks.machine import machine
from benchmarks.mcsa import COPY, cpu_s

BLOCKS, BLOCK = 8, 3 * 128 * 512  # q, k and v of a block of width 128 with 8 heads of 64
BYTES = {"sgd": 16, "adam": 24}  # bytes read and written for each weight


def measure(optimiser: str, clients: int, block: int, repeats: int) -> dict[str, Any]:
    """Measure the seconds of a step and of generating for the cohort, and the ratio of the step to the roof."""
    draw = torch.Generator().manual_seed(0)
    initial = {f"blocks.{index}.qkv": torch.randn(block, generator=draw) * 0.05 for index in range(BLOCKS)}
    subject = Hypernetwork(
        HypernetworkSettings(server_optimiser="sgd" if optimiser == "sgd" else "adam"),
        MemoryVault(),
        0,
        {name: [name] for name in initial},
    )
    subject.start(initial)
    names = [f"{index:02}" for index in range(clients)]
    updates = [PartUpdate(name, 1, {key: 1e-3 * torch.randn(block, generator=draw) for key in initial}) for name in names]
    source, target = torch.randn(COPY), torch.empty(COPY)
    subjects: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "generate": lambda: list(subject.generate(names)),
        "step": lambda: subject._descend(updates, phi=True),
    }
    subjects["step"]()  # the first step creates the moments
    best = dict.fromkeys(subjects, float("inf"))
    for _ in range(repeats):
        for name, work in subjects.items():
            with torch.no_grad():
                best[name] = min(best[name], cpu_s(work))
    weights = 150 * BLOCKS * block + BLOCKS * block
    roof_s = BYTES[optimiser] * weights / (8 * COPY / best["copy"])
    return {
        "optimiser": optimiser,
        "clients": clients,
        "weights": weights,
        "copy_gb_s": round(8 * COPY / best["copy"] / 1e9, 1),
        "must_touch_bytes": BYTES[optimiser] * weights,
        "roof_s": round(roof_s, 3),
        "step_s": round(best["step"], 3),
        "generate_s": round(best["generate"], 3),
        "times_the_roof": round(best["step"] / roof_s, 2),
    }


@click.command()
@click.option("--clients", default=5, show_default=True)
@click.option("--block", default=BLOCK, show_default=True, help="Generated weights of one of the 8 blocks.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file (default: only print it).")
def main(clients: int, block: int, repeats: int, out: Path | None) -> None:
    """Measure both optimisers on one thread."""
    torch.set_num_threads(1)
    on, cases = machine(), []
    for optimiser in BYTES:
        cases.append(measure(optimiser, clients, block, repeats))
        click.echo(msgspec.json.encode(cases[-1]).decode())
    if out is not None:
        command = f"python -m benchmarks.hypernetwork {' '.join(sys.argv[1:])}".strip()
        report = {"command": command, "what": "CPU seconds of one thread, best of several", "machine": on, "cases": cases}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
