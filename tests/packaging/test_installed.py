"""The installed wheel beside foreign packages that are called common, fedserver and fedclient."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import Process, Server, tabular_shard

FOREIGN = "raise ImportError(f'Attune imported a stranger: {__file__}')\n"
FEDERATION = ("--method", "fedavg", "--rounds", "1", "--min-clients", "2", "--set", "train.local_epochs=1")


@dataclass(frozen=True)
class Installation:
    """Environment with the wheel, and a working folder that PYTHONPATH names first."""

    folder: Path
    site_packages: Path
    work: Path
    environment: dict[str, str]
    new: frozenset[str]  # entries that the wheel's installation has added to site-packages

    @property
    def bin(self) -> Path:
        return self.folder / "bin"


@pytest.fixture(scope="module")
def installed(
    wheel: Path, clean_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Install the wheel in a new environment, with the dependencies of the running one.

    The running environment's own `attune` is not visible: it is found through a .pth file, and Python reads .pth files only in
    its own site-packages.
    """
    folder, work = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("work")
    venv.create(folder, symlinks=True)
    site_packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder)}))
    _foreign_package(site_packages / "common")
    before = {path.name for path in site_packages.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    done = subprocess.run(install, env=clean_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    new = frozenset(path.name for path in site_packages.iterdir()) - before
    dependencies = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    _foreign_package(work / "common")
    for name in ("fedserver.py", "fedclient.py"):
        (work / name).write_text(FOREIGN)
    more = {"PYTHONPATH": str(work), "ATTUNE_HOME": str(work / "home"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    yield Installation(folder, site_packages, work, clean_environment | more, new)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Yield a list of processes, which are gone when the test ends."""
    started: list[Process] = []
    yield started
    for process in started:
        if process.popen.poll() is None:
            process.kill()


def _foreign_package(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").write_text(FOREIGN)


def test_the_wheel_adds_attune_alone(installed: Installation) -> None:
    assert {name for name in installed.new if not name.endswith(".dist-info")} == {"attune"}
    assert len(installed.new) == 2


def test_it_is_the_wheel_that_is_imported_and_the_strangers_are_in_the_way(installed: Installation) -> None:
    program = "import attune, importlib.util as u\nprint(attune.__file__)\n"
    program += "for name in ('common', 'fedserver', 'fedclient'): print(u.find_spec(name).origin)"
    python = [str(installed.bin / "python"), "-c", program]
    done = subprocess.run(python, env=installed.environment, cwd=installed.work, capture_output=True, text=True, check=True)
    ours, *strangers = done.stdout.splitlines()
    assert Path(ours) == installed.site_packages / "attune" / "__init__.py"
    assert [Path(path) for path in strangers] == [
        installed.work / "common" / "__init__.py",
        installed.work / "fedserver.py",
        installed.work / "fedclient.py",
    ]


def test_a_federation_runs_from_a_folder_with_packages_of_those_names(
    installed: Installation, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a server and a hosted fleet of two devices with the installed commands, for one round of FedAvg; then simulate it."""
    monkeypatch.chdir(installed.work)
    for seed in (1, 2):
        tabular_shard(installed.work / "shards" / f"shard{seed}", seed)
    serve = [str(installed.bin / "fedserver"), "--host", "127.0.0.1", "--port", "0", "--exit-when-done", *FEDERATION]
    home = installed.work / "home" / "server"
    server = Server(serve, installed.work / "server.log", installed.environment, home, fresh=True)
    processes.append(server)
    train = [str(installed.bin / "fedclient"), "--data", "shards/*", "--server", f"localhost:{server.port}", "--device", "cpu"]
    fleet = Process(train, installed.work / "fleet.log", installed.environment, fresh=True)
    processes.append(fleet)
    assert fleet.code() == 0, fleet.text
    assert server.code() == 0, server.text
    models = sorted(installed.work.glob("home/devices/*/*/model/model.safetensors"))
    assert [path.parents[1].name.partition("-")[0] for path in models] == ["shard1", "shard2"]
    simulate = [str(installed.bin / "fedserver"), "simulate", "--data", "shards/*", "--method", "fedavg", "--rounds", "1"]
    done = subprocess.run(simulate, env=installed.environment, cwd=installed.work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("model: ") and [line.split()[0] for line in lines[1:5]] == ["device", "shard1", "shard2", "mean"]
