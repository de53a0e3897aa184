"""Example of a package, installed by pip as users install theirs, into a folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "attune-example"


def install(folder: Path) -> Path:
    """Install examples/plugin offline below `folder`, and return the entry for PYTHONPATH."""
    source, target = folder / "source", folder / "site"
    # Building writes into the folder that it builds.
    shutil.copytree(ROOT / "examples" / "plugin", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def with_package(environment: dict[str, str], target: Path) -> dict[str, str]:
    """Return the environment of a process that finds the package."""
    places = [str(target), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
