"""constraints-lowest.txt has the lowest version of every requirement in pyproject.toml; `make lowest` tries it."""

import sys
from collections.abc import Iterable
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.checkout import ROOT, pyproject

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
GENERATOR = "grpcio-tools"  # needed by `make proto` only


def of_python(lines: Iterable[str], python: str) -> list[Requirement]:
    """Return the lines that count for a version of Python."""
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate({"python_version": python})]


def pins(name: str, python: str) -> dict[str, Version]:
    """Return the versions that a constraints file pins for a version of Python, by distribution."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = of_python((line for line in lines if line.strip() and not line.startswith("#")), python)
    assert all(one.operator == "==" for requirement in found for one in requirement.specifier)
    assert len({requirement.name for requirement in found}) == len(found)
    return {requirement.name: Version(next(iter(requirement.specifier)).version) for requirement in found}


def requirements(python: str) -> list[Requirement]:
    """Return the requirements of an installation, of its extras for users and of the build."""
    settings = pyproject()
    extras = settings["project"]["optional-dependencies"]
    lines = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    lines += [line for extra in ("data", "knn", "server", "train") for line in extras[extra] if "attune-fl" not in line]
    return of_python(lines, python)


def test_every_python_that_is_named_is_tried_here() -> None:
    said = [line.rpartition(" :: ")[2] for line in pyproject()["project"]["classifiers"] if " :: Python :: 3." in line]
    assert said == list(PYTHONS)
    assert pyproject()["project"]["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize("python", PYTHONS)
def test_each_lowest_version_is_the_pinned_one(python: str) -> None:
    bounds = {one.name: [part.version for part in one.specifier if part.operator == ">="] for one in requirements(python)}
    assert [name for name, found in bounds.items() if len(found) != 1] == []
    lowest = {name: Version(found[0]) for name, found in bounds.items()}
    pinned = pins("constraints-lowest.txt", python)
    assert pinned.pop(GENERATOR) == lowest["grpcio"]
    assert pinned == lowest


@pytest.mark.parametrize("python", PYTHONS)
def test_the_newest_versions_that_are_tried_are_allowed(python: str) -> None:
    newest = pins("constraints.txt", python)
    assert [str(one) for one in requirements(python) if newest[one.name] not in one.specifier] == []


def test_the_versions_that_run_here_are_allowed() -> None:
    """Check that this environment is up to date, so that it is the declared one."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [str(one) for one in requirements(here) if not one.specifier.contains(version(one.name))] == []
