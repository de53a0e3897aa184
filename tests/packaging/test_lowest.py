"""constraints-lowest.txt has the lowest version of everything that pyproject.toml asks for; `make lowest` tries it."""

from __future__ import annotations

from importlib.metadata import version

from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.checkout import ROOT, pyproject

GENERATOR = "grpcio-tools"  # needed by `make proto` only


def pins(name: str) -> dict[str, Version]:
    """The pinned versions of a constraints file, by distribution."""
    requirements = [
        Requirement(line)
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert all(one.operator == "==" for requirement in requirements for one in requirement.specifier)
    return {requirement.name: Version(next(iter(requirement.specifier)).version) for requirement in requirements}


def requirements() -> list[Requirement]:
    """What an installation, its extras for users and the build ask for."""
    settings = pyproject()
    extras = settings["project"]["optional-dependencies"]
    lines = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    return [Requirement(line) for line in (*lines, *extras["data"], *extras["knn"])]


def test_each_lowest_version_is_the_pinned_one() -> None:
    bounds = {one.name: [part.version for part in one.specifier if part.operator == ">="] for one in requirements()}
    assert [name for name, found in bounds.items() if len(found) != 1] == []
    lowest = {name: Version(found[0]) for name, found in bounds.items()}
    pinned = pins("constraints-lowest.txt")
    assert pinned.pop(GENERATOR) == lowest["grpcio"]
    assert pinned == lowest


def test_the_newest_versions_that_are_tried_are_allowed() -> None:
    newest = pins("constraints.txt")
    assert [str(one) for one in requirements() if newest[one.name] not in one.specifier] == []


def test_the_versions_that_run_here_are_allowed() -> None:
    """So that an environment which was not brought up to date does not pass for the declared one."""
    assert [str(one) for one in requirements() if not one.specifier.contains(version(one.name))] == []
