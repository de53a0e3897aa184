"""The wheel, built once from a copy, because building writes into its folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT, files


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """Return this process's environment without a PYTHONPATH, which would put the checkout before the installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, clean_environment: dict[str, str]) -> Path:
    """Build the wheel offline with the setuptools of this environment."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for path in files():
        (copy / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    build = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    done = subprocess.run([*build, str(copy)], env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.iterdir()
    return built
