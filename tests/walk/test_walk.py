"""README and tutorial, command by command, on a copy of the checkout: what a reader types works."""

import csv
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT, files
from tests.walk.script import INSTALLING, script

PORT = "50051"


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--real"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout's files, with a free port in place of the usual one, because other tests run at the same time."""
    folder = tmp_path_factory.mktemp("walk") / "attune"
    for path in files():
        (folder / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    (folder / ".package").mkdir()
    (folder / ".package/attune").symlink_to(folder)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    for name in ("README.md", "docs/tutorial.md", "simulation/starter/project/run.py"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace(PORT, port), encoding="utf-8")
    return folder


def walk(clone: Path, page: str, real: bool) -> str:
    """Run a page in a shell like a reader's, with the commands on the path. Return what was printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ATTUNE_HOME")}
    environment |= {"ATTUNE_HOME": str(clone / "homes"), "OMP_NUM_THREADS": "1"}
    if not real:
        environment |= {"PYTHONPATH": str(clone / ".package"), "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    text = (clone / page).read_text(encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", script(text, real)], cwd=clone, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(1800)
def test_the_readme_as_it_is_written(clone: Path, real: bool) -> None:
    said = walk(clone, "README.md", real)
    assert all(f"$ {line}" in said for line in INSTALLING) is real
    tables = [set(line.split()) for line in said.splitlines() if line.startswith("device ")]
    # simulate and run.py, which also trains a local network; then simulate and a program with own tables
    assert ["method" in heads for heads in tables] == [True, False] * 2
    assert ["local" in heads for heads in tables] == [False, True, False, False]
    assert all("alone" in heads for heads in tables)
    assert said.count("\ndone: all 15 rounds are done") == 3
    with (clone / "clinic/labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40  # new.csv, which lacks a column, has gaps, and has a ward of its own
    assert {row["label"] for row in rows} == {"yes", "no"}


@pytest.mark.timeout(1800)
def test_the_tutorial_as_it_is_written(clone: Path, real: bool) -> None:
    """Run a table, a torch module and a training loop of one's own, and a server and two devices over the network."""
    said = walk(clone, "docs/tutorial.md", real)
    assert "age,dose,weight,state" in said
    labels = [row["label"] for row in csv.DictReader((clone / "first-hour/labels.csv").open())]
    truth = [row["state"] for row in csv.DictReader((clone / "first-hour/kiel.csv").open())]
    right = sum(a == b for a, b in zip(labels, truth, strict=True))
    assert right > 100, "of 120, with a loop that learns"


def test_a_project_is_not_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("fedserver")), "new", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [tmp_path / "mine.txt"])
    assert "nothing was written" in done.stderr
