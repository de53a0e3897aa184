"""Fuzzing of every target by coverage, with a small kept corpus and a table of results: `python -m tests.fuzz.run`.

It needs atheris (`make fuzz` installs it). Each target has a process of its own, which begins with the seeds and with the
inputs of tests/fuzz/found. At its end, the inputs that reach different code are kept there. A crash is printed, and its input
is kept.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tests.fuzz.corpus import LONGEST, keep
from tests.fuzz.targets import TARGETS

STEP = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)", re.MULTILINE)
DONE = re.compile(r"^Done (\d+) ", re.MULTILINE)


def begin(target: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fuzz.fuzz", target, str(folder / target), *options, f"-max_len={LONGEST}"]
    log = (folder / f"{target}.log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)


def read_log(text: str) -> dict[str, Any]:
    """Parse the log of libFuzzer: inputs that were tried, and edges and features of the program that they reached."""
    steps = STEP.findall(text)
    thrown = DONE.search(text)
    number, edges, features = map(int, steps[-1]) if steps else (0, 0, 0)
    return {"executions": int(thrown[1]) if thrown else number, "edges": edges, "features": features}


def small(target: str, folder: Path) -> int:
    """Keep the inputs that are needed for the coverage of all, and return their number."""
    least = folder / f"{target}.least"
    least.mkdir()
    command = [sys.executable, "-m", "tests.fuzz.fuzz", target, str(folder / target), "-merge=1", str(least)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    crashes = folder.glob(f"crash-{target}-*")
    return keep(target, [path.read_bytes() for path in (*crashes, *least.iterdir())])


def result(target: str, folder: Path, seconds: float) -> Mapping[str, Any]:
    text = (folder / f"{target}.log").read_text(errors="replace")
    crashes = sorted(folder.glob(f"crash-{target}-*"))
    if crashes:
        click.echo("\n".join(text.splitlines()[-40:]))
    found = {"target": target, "seconds": round(seconds), **read_log(text), "crashes": len(crashes)}
    return found | {"kept": small(target, folder)}


@click.command()
@click.option("--seconds", default=600, help="For each target.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), default=tuple(TARGETS))
@click.option("--at-once", default=2, help="Targets at one time.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(seconds: int, targets: tuple[str, ...], at_once: int, out: Path) -> None:
    """Write one row for each target to --out. The exit status is 1 if something crashed."""
    rows: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for first in range(0, len(targets), at_once):
            begun = time.monotonic()
            running = {
                each: begin(each, place, f"-max_total_time={seconds}", f"-artifact_prefix={place}/crash-{each}-")
                for each in targets[first : first + at_once]
            }
            for each, process in running.items():
                process.wait()
                rows.append(result(each, place, time.monotonic() - begun))
                click.echo(json.dumps(rows[-1]))
    out.write_text(json.dumps({"command": f"python -m tests.fuzz.run --seconds {seconds}", "targets": rows}, indent=1) + "\n")
    sys.exit(any(row["crashes"] for row in rows))


if __name__ == "__main__":
    main()
