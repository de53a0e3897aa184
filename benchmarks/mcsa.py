"""Arithmetic of FedMCSA's attention compared with the machine's roofs, in one run (anchors.md section 3).

With S clients and D weights it needs 4 S^2 D operations and 12 S D bytes (read for the inner products, read and written for the
mixture). The roofs are the times of a square float32 product with as many operations, and of a copy in memory of as many bytes;
the longer one counts. Times are CPU times of one thread, so that other work on the machine counts little. Each is the best of
several, with roofs and subjects in turn.

A round in files is the server's: it reads updates from the page cache, writes and hashes the next values, and moves the mean of
all. Its roof is the time to read and write the bytes that it must touch: the updates, the values before, and the next ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings
from attune.common.wire.digest import digest_of
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver import process
from attune.fedserver.lab.aggregators.attention import Mcsa, attention, cosines
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.votes import gram, mix_
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.stores.folder import FolderBlobs
from benchmarks.machine import machine

CASES = ((10, 10_000_000), (20, 5_000_000), (50, 4_000_000))
SQUARE, COPY = 1536, 64 << 20  # float32 numbers


def cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def naive(X_SD: torch.Tensor, sigma: float) -> torch.Tensor:
    """Compute attention with the obvious four lines."""
    norm_SD = X_SD / X_SD.norm(dim=1, keepdim=True)
    A_SS: torch.Tensor = (sigma * norm_SD @ norm_SD.T).softmax(dim=1)
    return A_SS @ X_SD


def mcsa_(X_SD: torch.Tensor, sigma: float) -> None:
    mix_(X_SD, attention(cosines(gram(X_SD)), sigma))


def whole_round(X_SD: torch.Tensor) -> None:
    """Run a round as the server does, with stacking and the vault's copies."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(), vault, 0, {"x": ["x"]})
    aggregator.start({"x": X_SD[0]})
    aggregator.close_round([PartUpdate(f"{i:03}", 1, {"x": row_D}) for i, row_D in enumerate(X_SD)])


class Files:
    """A server's vault and a cohort's updates on disk, after a first round. The next round replaces values in the vault."""

    def __init__(self, folder: Path, X_SD: torch.Tensor) -> None:
        self._folder, self._shape = folder, X_SD.shape
        blobs = FolderBlobs(folder / "server")
        self._vault = StateVault(blobs, "attended", [], 0)
        self._aggregator = Mcsa(AttentionSettings(), self._vault, 0, {"x": ["x"]})
        self._aggregator.start({"x": X_SD[0]})
        self._bytes = bytearray(X_SD.shape[1] * 4)
        for i, row_D in enumerate(X_SD):
            write_tensors(folder / f"{i:03}.safetensors", {"x": row_D})
        self.round()

    def round(self) -> None:
        with ExitStack() as stack:
            files = [stack.enter_context(TensorFile(self._folder / f"{i:03}.safetensors")) for i in range(self._shape[0])]
            self._aggregator.close_round([PartUpdate(f"{i:03}", 1, file) for i, file in enumerate(files)])
        self._vault.settle()

    def bytes(self) -> None:
        """Read each client's update and its value before, and write its next value, in memory that is allocated already."""
        for i in range(self._shape[0]):
            for _ in range(2):
                with (self._folder / f"{i:03}.safetensors").open("rb", buffering=0) as file:
                    file.readinto(self._bytes)
            with (self._folder / f"{i:03}.written").open("wb", buffering=0) as file:
                file.write(self._bytes)

    def digest(self) -> None:
        """Hash the bytes that a round writes."""
        for _ in range(self._shape[0]):
            digest_of(self._bytes)


def measure(S: int, D: int, repeats: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    X_SD = torch.randn(1, D, generator=draw) + 0.2 * torch.randn(S, D, generator=draw)
    square, source, target = torch.randn(SQUARE, SQUARE), torch.randn(COPY), torch.empty(COPY)
    A_SS = torch.full((S, S), 1 / S, dtype=torch.float64)
    subjects: dict[str, Callable[[], object]] = {
        "square": lambda: square @ square,
        "copy": lambda: target.copy_(source),
        "naive": lambda: naive(X_SD, 50.0),
        "gram": lambda: gram(X_SD),
        "gram_float64": lambda: gram(X_SD, exact=True),
        "mix": lambda: mix_(X_SD, A_SS),
        "mcsa": lambda: mcsa_(X_SD, 50.0),
        "round": lambda: whole_round(X_SD),
    }
    with tempfile.TemporaryDirectory(prefix="attune-mcsa-") as scratch:
        files = Files(Path(scratch), X_SD)
        subjects |= {"round_in_files": files.round, "bytes": files.bytes, "digest": files.digest}
        best = dict.fromkeys(subjects, float("inf"))
        for _ in range(repeats):
            for name, work in subjects.items():
                best[name] = min(best[name], cpu_s(work))
    flops, bandwidth = 2 * SQUARE**3 / best["square"], 8 * COPY / best["copy"]
    arithmetic_s, memory_s = 4 * S * S * D / flops, 12 * S * D / bandwidth
    roof_s = max(arithmetic_s, memory_s)
    return {
        "clients": S,
        "weights": D,
        "gflops": round(flops / 1e9, 1),
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "smaller_roof": "arithmetic" if arithmetic_s > memory_s else "memory",
        "roof_s": round(roof_s, 4),
        **{f"{name}_s": round(best[name], 4) for name in list(subjects)[2:]},
        "round_beyond_mixing_by_bytes": round((best["round_in_files"] - best["mcsa"]) / best["bytes"], 2),
        "share_of_roof": round(roof_s / best["mcsa"], 3),
        "share_of_roof_naive": round(roof_s / best["naive"], 3),
        "share_of_roof_float64": round(roof_s / (best["gram_float64"] + best["mix"]), 3),
    }


@click.command()
@click.option("--repeats", default=5)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "mcsa.json")
def main(repeats: int, out: Path) -> None:
    """Measure on one thread, with the server's settings of memory, and write the figures."""
    process.prepare_memory()
    torch.set_num_threads(1)
    results = []
    for S, D in CASES:
        results.append(measure(S, D, repeats))
        click.echo(msgspec.json.encode(results[-1]).decode())
    report = {
        "what": "MCSA on one thread; CPU seconds, best of several",
        "repeats": repeats,
        "machine": machine(),
        "cases": results,
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
