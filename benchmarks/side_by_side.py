"""The same task on the same machine by Attune's simulation, a loop of plain PyTorch, and the simulations of others.

`python -m benchmarks.side_by_side --env flower=ENV/bin/python --env pfl=ENV/bin/python --env fedjax=ENV/bin/python`: each
contender has an environment of its own (its file below benchmarks/contenders says what to install). Contenders without `--env`
are left out. They run one after the other, several times in turn, and may use all processors. A round's wall and processor time
are those between the end of the first round and the end of the last one, so starting does not count. Processor time is that of
all processes of a contender, including those of Ray.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from benchmarks.contenders import task
from benchmarks.machine import machine
from benchmarks.processes import REPOSITORY
from benchmarks.study import named
from benchmarks.usage import tree_cpu_s

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: a contender's daemons stay below this process, so that their time counts
ROUNDS = {
    "attune, stacked": 30,
    "attune, sequential": 6,
    "attune, processes": 6,
    "plain PyTorch": 10,
    "pfl": 10,
    "fedjax": 10,
    "flower": 4,
}
OWN = {"attune, stacked": "stacked", "attune, sequential": "sequential", "attune, processes": "processes"}
OTHERS = {"pfl": "pfl_research", "fedjax": "fedjax_jit", "flower": "flower"}


def commands(environments: Mapping[str, Path]) -> Mapping[str, tuple[Path, Sequence[str]]]:
    """Return each contender's command: its Python, and the arguments."""
    here = Path(sys.executable)
    ours: dict[str, tuple[Path, Sequence[str]]] = {name: (here, ["ours", executor]) for name, executor in OWN.items()}
    others = {name: (environments[name], [module]) for name, module in OTHERS.items() if name in environments}
    return ours | {"plain PyTorch": (here, ["plain"])} | others


def measure(python: Path, words: Sequence[str], data: Path, rounds: int) -> dict[str, float]:
    """Measure wall_s and processor_s of a round, and the accuracy at the end.

    Raises:
        RuntimeError: The contender has failed. The message has its last output.
    """
    module, *more = words
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / '.package'}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    environment |= {
        "RAY_worker_niceness": "0",
        "PYTHONUNBUFFERED": "1",
    }  # contenders are as important as other work of this machine
    command = [str(python), "-m", f"benchmarks.contenders.{module}", str(data), str(rounds), *more]
    stamps: list[tuple[float, float]] = []
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=data.parent
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line == "round\n":
                stamps.append((time.monotonic(), tree_cpu_s(os.getpid())))
            elif line.startswith('{"accuracy"'):
                found |= json.loads(line)
        process.wait()
        errors.seek(0)
        said = errors.read()
    _reap()
    if len(stamps) != rounds or not found:
        raise RuntimeError(
            f"{' '.join(command)}: {len(stamps)} of {rounds} rounds, exit status {process.returncode}\n{said[-3000:]}"
        )
    wall, cpu = ((last - first) / (rounds - 1) for first, last in zip(stamps[0], stamps[-1], strict=True))
    return found | {"wall_s": wall, "processor_s": cpu}


def _reap() -> None:
    """Wait for the processes that a contender has left, so that their time does not count for the next one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.2)


@click.command()
@click.option("--devices", default=100, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--env", multiple=True, metavar="NAME=PATH", help=f"The Python of {', '.join(OTHERS)}.")
@click.option("--only", multiple=True, help="Only these contenders.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "side_by_side.json")
def main(devices: int, repeats: int, env: Sequence[str], only: Sequence[str], out: Path) -> None:
    """Measure all in turn. Write medians, and the ratios to our fastest executor."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    before, runs = machine(), defaultdict[str, list[dict[str, float]]](list)
    with tempfile.TemporaryDirectory(prefix="attune-side-") as folder:
        data = Path(folder) / "data.npz"
        task.write(data, devices)
        for _ in range(repeats):
            for name, (python, words) in commands(named(env)).items():
                if not only or name in only:
                    runs[name].append(measure(python, words, data, ROUNDS[name]))
                    click.echo(f"{name:<20} " + "  ".join(f"{key} {value:.3f}" for key, value in runs[name][-1].items()))
    medians = {name: {key: median(run[key] for run in some) for key in some[0]} for name, some in runs.items()}
    report: dict[str, Any] = {
        "what": "a round of FedAvg: wall and processor seconds, medians; times: of ours, stacked",
        "devices": devices, "steps": task.STEPS, "batch": task.BATCH, "model": f"linear {task.FEATURES} x {task.CLASSES}",
        "machine": before, "repeats": repeats, "runs": runs, "medians": medians,
    }  # fmt: skip
    if ours := medians.get("attune, stacked"):
        report["times"] = {
            name: {key: round(each[key] / ours[key], 2) for key in ("wall_s", "processor_s")} for name, each in medians.items()
        }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    click.echo(msgspec.json.encode(report.get("times")).decode())


if __name__ == "__main__":
    main()
