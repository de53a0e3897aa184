"""Speed of the heavy parts of aggregators on this machine's GPU, compared with one thread of its processor (`make gpu`).

The figures are seconds of wall time until the GPU is done, the best of several. A round of FedTP at the size of its paper is
measured on the GPU alone. Without a GPU, the script says so and measures nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import torch

from attune.common.config import load_settings
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.fedserver.lab import accelerator
from attune.fedserver.lab.aggregators.attention import attention, cosines
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from attune.fedserver.lab.aggregators.votes import gram, mix_
from attune.simulation.simulate import simulate
from benchmarks.hypernetwork import BLOCK, BLOCKS
from benchmarks.machine import machine
from benchmarks.mcsa import CASES
from benchmarks.tables import load

CLIENTS = 5


def wall_s(work: Callable[[], object], repeats: int) -> float:
    """Return the best wall time of `repeats`, after one that does not count."""
    best = float("inf")
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began_s)
    return round(best, 4)


def mixing(device: torch.device, clients: int, weights: int, repeats: int) -> float:
    """Measure inner products, attention and mixture of a cohort that lies on the device."""
    X_SD = torch.randn(clients, weights, generator=torch.Generator().manual_seed(0)).to(device)
    return wall_s(lambda: mix_(X_SD, attention(cosines(gram(X_SD).cpu()), 50.0)), repeats)


def hypernetwork(name: str, repeats: int) -> dict[str, float]:
    """Measure a step at the published size, and the generation of the weights of a cohort."""
    accelerator.use(name)
    draw = torch.Generator().manual_seed(0)
    initial = {f"blocks.{index}.qkv": torch.randn(BLOCK, generator=draw) * 0.05 for index in range(BLOCKS)}
    made = Hypernetwork(HypernetworkSettings(), MemoryVault(), 0, {part: [part] for part in initial})
    accelerator.use("cpu")
    made.start(initial)
    names = [f"{index:02}" for index in range(CLIENTS)]
    updates = [PartUpdate(each, 1, {key: 1e-3 * torch.randn(BLOCK, generator=draw) for key in initial}) for each in names]
    with torch.no_grad():
        return {
            "step_s": wall_s(lambda: made._descend(updates, phi=True), repeats),
            "generate_s": wall_s(lambda: list(made.generate(names)), repeats),
        }


def published_round(device: str, samples: int = 1000, rounds: int = 2, more: Sequence[str] = ()) -> float:
    """Return the seconds of a round of FedTP in which 5 of 6 devices train on images of noise, 32 x 32 x 3.

    It is the difference of two simulations, of one round and of `rounds` more, so that starts and evaluations do not count. The
    settings are those of the table fedtp-2-full, and then `more`.
    """
    table = load("fedtp-2-full")
    [row] = [row for row in table.row if row.name == "FedTP"]
    settings = load_settings(None, [*table.set, *row.set, "round.evaluate_every=1000", *more], {})
    draw = np.random.default_rng(0)

    def images(count: int) -> tuple[Any, Any]:
        return draw.normal(size=(count, 32, 32, 3)).astype(np.float32), np.arange(count) % 10

    shards = {f"device{index}": (*images(samples), *images(20)) for index in range(CLIENTS + 1)}
    ends_s = []
    for number in (1, 1 + rounds):
        began_s = time.perf_counter()
        simulate(shards, "fedtp", rounds=number, settings=settings, progress=False, device=device)
        ends_s.append(time.perf_counter() - began_s)
    return round((ends_s[1] - ends_s[0]) / rounds, 3)


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="A JSON file (default: only print it).")
def main(repeats: int, out: Path | None) -> None:
    """Measure all parts that a GPU takes over, on both."""
    if not torch.cuda.is_available():
        click.echo("this machine has no GPU that torch can use, so there is nothing to measure")
        return
    torch.set_num_threads(1)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "machine": machine()}
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        cohorts = [{"clients": s, "weights": d, "seconds": mixing(device, s, d, repeats)} for s, d in CASES]
        found[name] = {"hypernetwork": hypernetwork(name, repeats), "mcsa": cohorts}
        click.echo(msgspec.json.encode(found[name]).decode())
    found["cuda"]["published_round_s"] = published_round("cuda")
    if out is not None:
        command = {"command": f"python -m benchmarks.gpu {' '.join(sys.argv[1:])}".strip()}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(command | found)) + b"\n")


if __name__ == "__main__":
    main()
