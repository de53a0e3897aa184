"""`make chaos`: seeded runs of small federations under faults. No update is lost, no run hangs, and the bits are the same.

Run N has the seed CHAOS_SEED + N. Its number decides the kind of fault, its seed everything else. Each result is appended to
the file of results at once, with the command that repeats the run. The exit status is 1 if a run was red.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tests.chaos import drive, trials
from tests.chaos.drive import Trial
from tests.chaos.site import Outcome, Red, Shape, Site


class Lab:
    """Runner of trials. Undisturbed outcomes are computed once for each shape."""

    def __init__(self, folder: Path, longest_s: float, patience_s: float, keep: bool) -> None:
        self._folder, self._patience_s, self._keep = folder, patience_s, keep
        self._kinds = trials.kinds(longest_s, trials.can_mount(folder / "mount"))
        self._undisturbed: dict[str, Outcome] = {}

    def run(self, seed: int) -> dict[str, Any]:
        """Run a trial, and return its result in the form in which it is written."""
        kind, make = self._kinds[seed % len(self._kinds)]
        shape, trial = make(random.Random(seed))
        began = time.monotonic()
        try:
            why = self._tried(seed, shape, trial)
        except Red as red:
            why = str(red)
        found = {
            "seed": seed, "kind": kind, "shape": shape.name, "green": not why,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        if story := getattr(trial, "story", ""):
            found["story"] = story
        return found | ({"why": why, "again": f"python -m tests.chaos --only {seed} --keep"} if why else {})

    def _tried(self, seed: int, shape: Shape, trial: Trial) -> str:
        expected = self._reference(shape) if trial.compares else None
        groups = trials.FLEET_GROUPS if shape is trials.CHURN else None
        with Site(self._folder / f"run{seed}", shape, self._patience_s) as site:
            why = ""
            try:
                outcome = drive.run(site, trial, groups)
                if expected is not None:
                    why = "; ".join(outcome.differences(expected))
            except Red as red:
                why = str(red)
            finally:
                site.kill_all()
                trials.unmount(site)
            if why and self._keep:
                print(f"kept: {site.folder}")
            if not (why and self._keep):
                site.remove()
            return why

    def _reference(self, shape: Shape) -> Outcome:
        if shape.name not in self._undisturbed:
            with Site(self._folder / f"undisturbed-{shape.name}", shape, self._patience_s) as site:
                self._undisturbed[shape.name] = drive.run(site, Trial())
        return self._undisturbed[shape.name]


@click.command()
@click.option("--runs", type=int, default=200, envvar="CHAOS_RUNS", show_default=True)
@click.option("--seed", type=int, default=0, envvar="CHAOS_SEED", show_default=True, help="Of the first run.")
@click.option("--only", type=int, multiple=True, help="Seeds of single runs, in place of --runs.")
@click.option("--longest", "longest_s", type=float, default=20.0, envvar="CHAOS_LONGEST_S", show_default=True, help="Silence.")
@click.option("--patience", "patience_s", type=float, default=150.0, show_default=True, help="Seconds that a run may last.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("chaos.jsonl"), show_default=True, help="Results go here.")
@click.option("--keep", is_flag=True, help="Leave the folder of a red run.")
@click.option("--tries", type=int, default=1, show_default=True, help="A seed is red that was red so often in a row.")
def main(
    runs: int, seed: int, only: tuple[int, ...], longest_s: float, patience_s: float, out: Path, keep: bool, tries: int
) -> None:
    """Run small federations under seeded faults."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    lab = Lab(folder, longest_s, patience_s + 2 * longest_s, keep)
    red = 0
    try:
        for number in only or range(seed, seed + runs):
            red += not any(_told(lab.run(number), out) for _ in range(tries))
    finally:
        if not (keep and red):
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(only) or runs} runs, {red} red")
    sys.exit(1 if red else 0)


def _told(found: dict[str, Any], out: Path) -> bool:
    """Write and print a result, and return whether the run was green."""
    with out.open("a") as file:
        file.write(json.dumps(found) + "\n")
    words = "green" if found["green"] else f"RED: {found['why']}\n    again: {found['again']}"
    print(f"{found['seed']:5} {found['kind']:26} {found['shape']:8} {found['seconds']:5.1f} s  {words}", flush=True)
    return bool(found["green"])


if __name__ == "__main__":
    main()
