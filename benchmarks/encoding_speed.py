"""Processor time of each encoding on one thread: writing and reading 8 tensors of 2^20 numbers that changed by a hundredth.

`python -m benchmarks.encoding_speed --out benchmarks/results/encoding_speed.json`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch

from attune.common.exchange.encodings import decoded, encode
from attune.common.protocol import ENCODINGS
from attune.common.wire.tensors import Tensors, manifest_of
from benchmarks.machine import machine

TENSORS, SIDE, SPREAD, MOVED, REPEATS = 8, 1024, 0.05, 0.01, 3


def measure(encoding: str, tensors: Tensors, base: Tensors) -> dict[str, Any]:
    """Return the best of some repeats, in milliseconds of processor time for a MiB of plain tensors."""
    manifest, writes, reads = manifest_of(tensors), [], []
    for _ in range(REPEATS):
        began = time.process_time()
        written = encode(tensors, encoding, base).tensors
        wrote = time.process_time()
        read = dict(decoded(written, manifest_of(written), encoding, manifest, base, "the benchmark"))
        writes.append(wrote - began)
        reads.append(time.process_time() - wrote)
        assert read.keys() == tensors.keys()
    plain, sent = (sum(each.nbytes for each in some.values()) for some in (tensors, written))
    write_ms, read_ms = (round(min(each) * 1e3 / (plain / 2**20), 2) for each in (writes, reads))
    return {"encoding": encoding, "bytes": round(sent / plain, 3), "write_ms_per_mib": write_ms, "read_ms_per_mib": read_ms}


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(out: Path) -> None:
    """Write a JSON file."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    base = {f"layer{n}": torch.randn(SIDE, SIDE, generator=random) * SPREAD for n in range(TENSORS)}
    tensors = {name: each + torch.randn(SIDE, SIDE, generator=random) * SPREAD * MOVED for name, each in base.items()}
    rows = [measure(encoding, tensors, base) for encoding in ENCODINGS]
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        click.echo(" ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
