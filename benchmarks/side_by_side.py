"""The same tasks on this machine by Attune's simulation, a loop of plain PyTorch, and others' simulations: `make beside`.

Others have environments of their own, which `--env NAME=PYTHON` names; contenders without one are left out.
Contenders run one after the other, several times in turn, so that other work of the machine affects all. A round's wall and
processor time are those between the end of the first round and the end of the last one, so starting does not count.
Processor time is that of all processes of a contender, including those of Ray. "scikit-learn, pooled" is a logistic
regression on the training samples of all devices in one place: its time is that of the whole fit.
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
OURS = "attune, stacked"
POOLED = "scikit-learn, pooled"
OTHERS = {"pfl": "pfl_research", "fedjax": "fedjax_jit", "flower": "flower"}
MODULES = {"pfl": "pfl", "fedjax": "fedjax", "flower": "flwr"}  # their packages


def commands(environments: Mapping[str, Path]) -> Mapping[str, tuple[Path, Sequence[str]]]:
    """Return each contender's command: its Python, and the arguments."""
    here = Path(sys.executable)
    others = {name: (environments[name], [module]) for name, module in OTHERS.items() if name in environments}
    return {OURS: (here, ["ours", "stacked"]), "plain PyTorch": (here, ["plain"]), POOLED: (here, ["pooled"])} | others


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
    result: dict[str, float] = {}
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
                result |= json.loads(line)
        process.wait()
        errors.seek(0)
        said = errors.read()
    _reap()
    if len(stamps) != rounds or not result:
        raise RuntimeError(
            f"{' '.join(command)}: {len(stamps)} of {rounds} rounds, exit status {process.returncode}\n{said[-3000:]}"
        )
    wall, cpu = ((last - first) / (rounds - 1) for first, last in zip(stamps[0], stamps[-1], strict=True))
    return result | {"wall_s": wall, "processor_s": cpu}


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
@click.option("--rounds", default=20, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--task", "tasks", type=click.Choice(list(task.SHAPES)), multiple=True, help="Only these tasks.")
@click.option("--env", multiple=True, metavar="NAME=PATH", help=f"The Python of {', '.join(OTHERS)}.")
@click.option("--only", multiple=True, help="Only these contenders.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "side_by_side.json")
def main(
    devices: int, rounds: int, repeats: int, tasks: Sequence[str], env: Sequence[str], only: Sequence[str], out: Path
) -> None:
    """Measure all in turn. Write medians, and the ratios to our fastest executor."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    report: dict[str, Any] = {
        "what": "a round of FedAvg: wall and processor seconds, medians; times: of ours, stacked",
        "devices": devices, "rounds": rounds, "steps": task.STEPS, "batch": task.BATCH, "repeats": repeats,
        "machine": machine(),
        "versions": {name: version(path, MODULES[name]) for name, path in named(env).items()},
    }  # fmt: skip
    for name in tasks or task.SHAPES:
        report[name] = _in_turn(name, devices, rounds, repeats, named(env), only)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        click.echo(msgspec.json.encode(report[name]["times"]).decode())


def _in_turn(
    name: str, devices: int, rounds: int, repeats: int, environments: Mapping[str, Path], only: Sequence[str]
) -> dict[str, Any]:
    """Return the runs of one task, the medians of each contender, and their ratios to ours."""
    runs = defaultdict[str, list[dict[str, float]]](list)
    with tempfile.TemporaryDirectory(prefix="attune-side-") as folder:
        data = Path(folder) / "data.npz"
        task.write(data, devices, task.SHAPES[name])
        for _ in range(repeats):
            for contender, (python, words) in commands(environments).items():
                if not only or contender in only:
                    runs[contender].append(measure(python, words, data, 2 if contender == POOLED else rounds))
                    figures = "  ".join(f"{key} {value:.3f}" for key, value in runs[contender][-1].items())
                    click.echo(f"{name:<8} {contender:<20} {figures}")
    medians = {contender: {key: median(run[key] for run in some) for key in some[0]} for contender, some in runs.items()}
    ours = medians.get(OURS)
    times = {
        contender: {key: round(taken[key] / ours[key], 2) for key in ("wall_s", "processor_s")} if ours else {}
        for contender, taken in medians.items()
    }
    return {"runs": runs, "medians": medians, "times": times}


def version(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    code = f"from importlib.metadata import version; print({package!r}, version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
