"""Disk space of each role, and time to install it: `python -m benchmarks.installed --out FILE`.

For each role a new environment is made in a temporary folder: torch for the processor, then this checkout with the versions of
constraints.txt. Sizes are those of its files, including pip and the bytecode that it compiles.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
ROLES = {
    "light device": ".[light]",
    "device": ".[train]",
    "server": ".[server]",
    "both, with the digits and pictures (make install)": ".[data,server]",
}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def installed(what: str, folder: Path) -> dict[str, Any]:
    """Install into a new environment in `folder`, and return its size and time."""
    venv.create(folder, with_pip=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    began = time.monotonic()
    subprocess.run([*pip, "--no-deps", "--extra-index-url", TORCH_INDEX, torch], cwd=ROOT, check=True)
    subprocess.run([*pip, "--constraint", "constraints.txt", what], cwd=ROOT, check=True)
    listing = subprocess.run([*pip[:1], "list", "--format=json"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return {
        "installed": what,
        "distributions": len(json.loads(listing)),
        "mib": round(sum(sizes.values()) / 2**20),
        "of_torch_mib": round(sum(size for path, size in sizes.items() if "torch" in path.parts) / 2**20),
        "seconds": round(time.monotonic() - began),
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of results.")
def main(out: Path) -> None:
    """Measure each role."""
    rows = {}
    for role, what in ROLES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[role] = installed(what, Path(folder))
        click.echo(f"{role}: {rows[role]}")
    out.write_text(json.dumps({"machine": machine(), "python": sys.version.split()[0], "roles": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
