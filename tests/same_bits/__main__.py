"""`make same-bits REV=...`: the working tree and another revision run the same federations; every bit must be the same.

Both run at the same time on this machine, with the interpreter of this program and one thread each; `driver.py` has the cases.
It prints a line for each case, and a line for all. The exit status is 1 if a case differs or fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.py")
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHOWN = 4  # items of a case that are named; the others are counted


def compare(now: Mapping[str, Any], then: Mapping[str, Any], rev: str) -> list[str]:
    """Return what differs between two lines of the driver for one case; empty if every bit is the same. Slots come first."""
    failed = [f"{side} failed: {line['failed']}" for side, line in (("the working tree", now), (rev, then)) if "failed" in line]
    if failed:
        return failed
    mine, other = now["digests"], then["digests"]
    if not mine and not other:
        return ["nothing to compare: the case has left no digests"]
    only = [f"only in the working tree: {item}" for item in mine if item not in other]
    only += [f"only in {rev}: {item}" for item in other if item not in mine]
    return [*only, *(f"differs: {item}" for item in mine if item in other and mine[item] != other[item])]


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def copy(folder: Path) -> Path:
    """Copy the working tree with its uncommitted changes, so that the copy stays the same meanwhile."""
    for name in filter(None, git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():  # a deleted file is still listed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    describe(folder)
    return folder


@contextmanager
def worktree(folder: Path, rev: str) -> Iterator[Path]:
    """Check a revision out into a new folder, as a git worktree that is removed at the end."""
    git("worktree", "add", "--quiet", "--detach", str(folder), rev)
    try:
        describe(folder)
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def describe(root: Path) -> None:
    """Write the metadata of a tree's package, by which it finds its own commands and plug-ins."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "egg_info"]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def driven(root: Path, out: Path, only: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the driver with the `attune` of a tree; give its lines as they come."""
    out.mkdir()
    path = {"PYTHONPATH": f"{root / '.package'}{os.pathsep}{root}"}
    command = [sys.executable, str(DRIVER), str(out), only]
    with (out / "stderr.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=out, env=os.environ | THREADS | path, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        yield map(json.loads, process.stdout)
        if process.wait():
            raise click.ClickException(f"the driver of {root.name} failed:\n{(out / 'stderr.log').read_text()[-2000:]}")
    finally:
        process.terminate()
        process.wait()


@click.command()
@click.option("--rev", required=True, help="The revision that the working tree is compared with.")
@click.option("--keep", type=click.Path(path_type=Path), help="A new folder for all homes and logs, which then stay.")
@click.option("--only", default="", help="Only cases whose names contain this.")
def main(rev: str, keep: Path | None, only: str) -> None:
    """Compare the bits of the working tree with those of a revision."""
    began, red, count = time.monotonic(), 0, 0
    folder = Path(tempfile.mkdtemp(prefix="same-bits-")) if keep is None else keep.resolve()
    folder.mkdir(parents=True, exist_ok=keep is None)
    try:
        with (
            worktree(folder / "then", rev) as there,
            driven(copy(folder / "now"), folder / "of-now", only) as mine,
            driven(there, folder / "of-then", only) as other,
        ):
            for now, then in zip_longest(mine, other, fillvalue={"failed": "no line of the driver"}):
                differences = compare(now, then, rev)
                count, red = count + 1, red + bool(differences)
                said = f"DIFFERS: {'; '.join(differences[:SHOWN])}" if differences else f"same ({len(now['digests'])} digests)"
                more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
                click.echo(f"{now.get('case') or then.get('case')}: {said}{more}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    verdict = f"{red} of {count} cases differ from {rev}" if red else f"all {count} cases have the bits of {rev}"
    click.echo(f"{verdict} ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if red or not count else 0)


if __name__ == "__main__":
    main()
