"""Needs of each role: devices and simulations run without the extra `server`; a server names it in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attune.fedserver.web.serving import SERVER_EXTRA
from tests.packaging.checkout import pyproject

# Packages that are not found, as if they were not installed.
WITHOUT = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {SERVER_EXTRA} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
SIMULATION = """
import numpy
import attune
rng = numpy.random.default_rng(0)
shards = {name: (rng.normal(size=(20, 4)).astype("float32"), numpy.arange(20) % 2) for name in ("kiel", "lund")}
"""


@pytest.fixture
def run(tmp_path: Path):
    """Run a program without the packages of the extra."""

    def of(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT + program, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return of


def test_the_extra_is_what_a_server_looks_for() -> None:
    lines = pyproject()["project"]["optional-dependencies"]["server"]
    names = {line.partition(">=")[0].replace("grpcio", "grpc").replace("-", "_") for line in lines}
    of_remote_storage = {"obstore", "psycopg[binary]"}  # looked for where --ledger or --blobs names them
    assert {name.replace("grpc_health_checking", "grpc_health") for name in names} == {*SERVER_EXTRA, *of_remote_storage}


def test_a_simulation_imports_no_network_and_devices_need_nothing_of_the_extra(run) -> None:
    """Simulate first, because devices import the network. In one interpreter, because each imports torch anew."""
    modules = ("client", "fleet", "app", "cli", "doctor", "link.grpc_link", "link.enrol")
    program = "assert 'torch' not in sys.modules\n"
    program += "print(attune.simulate(shards, rounds=1, method='fedavg', progress=False).table())\n"
    program += "assert 'torch' in sys.modules and 'grpc' not in sys.modules\n"
    program += "".join(f"import attune.fedclient.{name}\n" for name in modules)
    program += "attune.simulate(shards, rounds=1, method='fedavg', progress=False, dashboard=True)\n"
    done = run(SIMULATION + program)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["device", "kiel", "lund", "mean"]
    assert done.stderr.splitlines()[-1].startswith("attune.common.errors.SettingError: ")
    assert "pip install 'attune-fl[server]'" in done.stderr.splitlines()[-1]


def test_a_server_without_the_extra_says_what_to_install_and_makes_no_home(run, tmp_path: Path) -> None:
    done = run("from attune.fedserver.cli import main\nmain()", "--home", str(tmp_path / "home"), "--port", "0")
    names = "grpc_health, grpc_reflection, prometheus_client, starlette, uvicorn"
    line = f"fedserver: a server needs {names}, not installed here: pip install 'attune-fl[server]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert not (tmp_path / "home").exists()
