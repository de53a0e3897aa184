"""Needs of each role: devices and simulations run without the extra `server`; a server names it in one line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from attune.features.web.feature import FEATURE
from attune.fedserver.process import SERVER_PACKAGES
from tests.packaging.checkout import NOT_SHIPPED, ROOT, files, package_folders, pyproject

SERVER_EXTRA = (*SERVER_PACKAGES, *FEATURE.packages)
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
    assert "attune-fl[train]" in lines
    lines.remove("attune-fl[train]")
    names = {line.partition(">=")[0].replace("grpcio", "grpc").replace("-", "_") for line in lines}
    of_remote_storage = {"obstore", "psycopg[binary]"}  # looked for where --ledger or --blobs names them
    assert {name.replace("grpc_health_checking", "grpc_health") for name in names} == {*SERVER_EXTRA, *of_remote_storage}


def test_a_simulation_imports_no_network_and_devices_need_nothing_of_the_extra(run) -> None:
    """Simulate first, because devices import the network. In one interpreter, because each imports torch anew."""
    modules = ("client", "fleet", "cli", "doctor", "link.grpc_link", "link.enrol")
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


# --- the version and the habits of the repository: the same version everywhere, and hooks that run what `make check` runs


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_version_is_the_same_in_the_changelog_and_the_citation() -> None:
    version = pyproject()["project"]["version"]
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert (newest[1], read("CITATION.cff")["version"]) == (version, version)


def test_both_papers_are_cited_as_the_pages_of_their_methods_do() -> None:
    assert read("CITATION.cff")["license"] == pyproject()["project"]["license"]
    for page, paper in zip(("fedtp", "fedmcsa"), read("CITATION.cff")["references"], strict=True):
        text = " ".join((ROOT / "docs" / "methods" / f"{page}.md").read_text(encoding="utf-8").split())
        authors = ", ".join(f"{author['given-names'][0]}. {author['family-names']}" for author in paper["authors"])
        assert paper["title"] in text
        assert authors in text.replace("C.-T. Lin", "C. Lin")


@pytest.mark.parametrize("tool", ["ruff format", "ruff check", "lint-imports"])
def test_a_hook_runs_a_tool_as_make_check_does(tool: str) -> None:
    [recipe] = re.findall(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    entries = [" ".join(shlex.split(hook["entry"])) for hook in read(".pre-commit-config.yaml")["repos"][0]["hooks"]]
    assert f"$(BIN)/{tool}" in recipe
    assert [entry for entry in entries if entry.startswith(f".venv/bin/{tool}")] != []
    assert "make check" in entries


# --- pyproject.toml against the checkout: the list of packages, and the names of the distribution and its extras


def test_every_folder_with_an_init_file_is_listed() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {".".join(("attune", *folder.parts)) for folder in package_folders()}


def test_no_module_lies_in_a_folder_without_an_init_file() -> None:
    folders = package_folders()
    modules = [path for path in files() if path.suffix == ".py" and path.parts[0] not in NOT_SHIPPED]
    assert len(modules) > 100
    written = Path("simulation/starter/project")  # files for `fedserver new`, not modules
    assert [path for path in modules if path.parent not in {*folders, written}] == []


def test_what_people_are_told_to_install_is_ours() -> None:
    """Check the name: on PyPI `attune` is a package of somebody else."""
    project = pyproject()["project"]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files() if path.suffix in (".md", ".py", ".toml")}
    told = {(path, name) for path, text in texts.items() for name in re.findall(r"pip install ['\"]?(attune[\w-]*)", text)}
    assert {name for _, name in told} == {project["name"]}, told
    extras = {extra for text in texts.values() for extra in re.findall(r"attune-fl\[(\w+)\]", text)}
    assert extras
    assert extras <= set(project["optional-dependencies"])
