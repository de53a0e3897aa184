"""The wheel: it has everything that runs and no other files, and runs beside foreign packages.

They are called common, fedserver and fedclient. The wheel is built from a copy, because building writes into its folder.
"""

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

from tests.e2e.harness import Process, Server, tabular_shard
from tests.packaging.checkout import ROOT, files, pyproject, shipped

pytestmark = pytest.mark.engines
FOREIGN = "raise ImportError(f'Attune imported a stranger: {__file__}')\n"

# Runs installed commands one after the other in one interpreter, which imports torch once.
ONE_BY_ONE = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
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
def clean_environment() -> dict[str, str]:
    """Return this process's environment without a PYTHONPATH, which would put the checkout before the installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def built(copy: Path, out: Path, environment: dict[str, str], hour: int = 0) -> Path:
    """Build the wheel offline with the setuptools of this environment, from a copy whose files are some hours old."""
    for path in files():
        (copy / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
        os.utime(copy / path, (3600 * hour + 1e9, 3600 * hour + 1e9))
    build = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"]  # as pip does
    done = subprocess.run(build, env=environment, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, clean_environment: dict[str, str]) -> Path:
    return built(tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel"), clean_environment)


def test_two_builds_at_other_times_and_places_have_the_same_bytes(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    places = [tmp_path / "one", tmp_path / "another" / "deeper"]
    fixed = clean_environment | {"SOURCE_DATE_EPOCH": "1700000000"}
    first, second = (built(place, place.with_suffix(".out"), fixed, hour) for hour, place in enumerate(places))
    assert first.read_bytes() == second.read_bytes()


@pytest.fixture(scope="module")
def installed(wheel: Path, clean_environment: dict[str, str], tmp_path_factory) -> Iterator[Installation]:
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
    install = [*pip, "install", "--quiet", "--no-compile", "--no-index", "--no-deps", str(wheel)]
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


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[PurePosixPath]:
    with ZipFile(wheel) as archive:
        return {PurePosixPath(name) for name in archive.namelist()}


def test_only_attune_is_at_the_top(names: set[PurePosixPath]) -> None:
    tops = {name.parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"attune"}
    assert len(tops) == 2


def test_every_file_of_the_packages_is_there_and_no_other(names: set[PurePosixPath]) -> None:
    inside = {name for name in names if name.parts[0] == "attune"}
    assert inside == {PurePosixPath("attune", path.as_posix()) for path in shipped()}


def test_the_typing_mark_the_protos_and_the_generated_code_are_shipped(names: set[PurePosixPath]) -> None:
    """Name them here, apart from the rule that the test above computes."""
    wanted = ("py.typed", "proto/attune/v1/federation.proto", "proto/attune/v1/admin.proto", "common/pb/federation_pb2.pyi")
    assert names >= {PurePosixPath("attune", name) for name in wanted}


def test_the_commands_and_the_licence_are_declared(wheel: Path, names: set[PurePosixPath]) -> None:
    [points] = [name for name in names if name.name == "entry_points.txt"]
    parser = configparser.ConfigParser()
    with ZipFile(wheel) as archive:
        parser.read_string(archive.read(str(points)).decode())
    assert dict(parser["console_scripts"]) == pyproject()["project"]["scripts"]
    assert [name for name in names if name.name == "LICENSE"]


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
    train = ["fedclient", "--data", "shards/*", "--server", f"localhost:{server.port}", "--device", "cpu"]
    simulate = ["fedserver", "simulate", "--data", "shards/*", "--method", "fedavg", "--rounds", "1"]
    words = [[str(installed.bin / name), *more] for name, *more in (train, simulate)]
    one_by_one = [str(installed.bin / "python"), "-c", ONE_BY_ONE, json.dumps(words)]
    fleet = Process(one_by_one, installed.work / "fleet.log", installed.environment, fresh=True)
    processes.append(fleet)
    assert fleet.code() == 0, fleet.text
    assert server.code() == 0, server.text
    models = sorted(installed.work.glob("home/devices/*/*/model/model.safetensors"))
    assert [path.parents[1].name.partition("-")[0] for path in models] == ["shard1", "shard2"]
    lines = fleet.text[fleet.text.index("\nmodel: ") + 1 :].splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["device", "shard1", "shard2", "mean"]
