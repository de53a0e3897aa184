"""Rounds with uvloop, and with larger frames of HTTP/2, beside rounds as they are: what was tried and not taken.

`python -m benchmarks.wire_options --uvloop FOLDER --out benchmarks/results/wire_options.json`, after `pip install --target
FOLDER uvloop`. A `sitecustomize` that all processes load changes the event loop or the options of gRPC. All ways run in turn.
On a busy machine wall times differ from run to run; the processor time is steadier.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks.machine import machine
from benchmarks.round import Case, measure

FRAME = 4 << 20  # bytes; gRPC's default is 16 KiB, and 64 KiB for the write buffer
LARGER = f'[("grpc.http2.max_frame_size", {FRAME}), ("grpc.http2.write_buffer_size", {FRAME})]'
WAYS = {
    "as it is": "",
    "uvloop": "import uvloop\nuvloop.install()\n",
    "larger frames": f"""import grpc.aio
server, channel = grpc.aio.server, grpc.aio.secure_channel
grpc.aio.server = lambda *a, options=(), **k: server(*a, options=[*options, *{LARGER}], **k)
grpc.aio.secure_channel = lambda target, credentials, options=(): channel(target, credentials, [*options, *{LARGER}])
""",
}
CASES = (Case(2, 1_000_000, 8, 15), Case(8, 1_000_000, 8, 10))


def run(case: Case, way: str, uvloop: Path) -> dict[str, float]:
    """Return the wall and the processor seconds of a round in one federation."""
    before = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory(prefix="attune-wire-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(WAYS[way])
        os.environ["PYTHONPATH"] = os.pathsep.join((folder, str(uvloop), before))
        try:
            found = measure(case)
        finally:
            os.environ["PYTHONPATH"] = before
    return {"wall_s": found["median_s"], "processor_s": round(found["cpu_server_s"] + found["cpu_devices_s"], 4)}


@click.command()
@click.option("--uvloop", type=click.Path(path_type=Path, exists=True), required=True, help="Folder with uvloop.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the figures.")
def main(uvloop: Path, repeats: int, out: Path) -> None:
    """Measure all ways in turn, and write medians and ratios as they come."""
    before, runs = machine(), dict[str, dict[str, list[dict[str, float]]]]()
    for _ in range(repeats):
        for case in CASES:
            for way in WAYS:
                of_case = runs.setdefault(f"{case.clients} x {case.parameters:,}", {name: [] for name in WAYS})
                of_case[way].append(run(case, way, uvloop))
                click.echo(f"{case.clients} devices, {way}: {of_case[way][-1]}", err=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(_report(before, runs))) + b"\n")


def _report(before: dict[str, Any], runs: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    medians = {
        case: {way: {key: statistics.median(each[key] for each in some) for key in some[0]} for way, some in ways.items()}
        for case, ways in runs.items()
    }
    ratios = {
        case: {way: {key: round(each[key] / ways["as it is"][key], 3) for key in each} for way, each in ways.items()}
        for case, ways in medians.items()
    }
    return {"machine": before, "frame_bytes": FRAME, "runs": runs, "medians": medians, "ratios": ratios}


if __name__ == "__main__":
    main()
