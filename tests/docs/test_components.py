"""The bill of materials: what Attune needs is in it with version and licence, what developers need alone is not."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from docs.components import components

MATERIALS = components()
BY_NAME = {component["name"]: component for component in MATERIALS["components"]}


@pytest.mark.parametrize("name", ["torch", "grpcio", "cryptography", "starlette", "cffi"])
def test_needed_packages_have_version_and_licence(name: str) -> None:
    """Starlette is of an extra; cffi is needed by cryptography alone."""
    component = BY_NAME[name]
    assert component["version"] == version(name) and component["purl"] == f"pkg:pypi/{name}@{version(name)}"
    assert all(licence["license"]["name"] for licence in component["licenses"]) and component["licenses"]


def test_packages_of_developers_and_attune_itself_are_no_components() -> None:
    assert not BY_NAME.keys() & {"pytest", "ruff", "mypy", "hypothesis", "attune-fl"}
    assert MATERIALS["metadata"]["component"]["name"] == "attune-fl"


def test_every_reference_is_to_something_that_is_listed() -> None:
    listed = {component["bom-ref"] for component in (*MATERIALS["components"], MATERIALS["metadata"]["component"])}
    relations = {relation["ref"]: set(relation["dependsOn"]) for relation in MATERIALS["dependencies"]}
    assert relations.keys() == listed and set().union(*relations.values()) <= listed
    assert f"pkg:pypi/cffi@{version('cffi')}" in relations[f"pkg:pypi/cryptography@{version('cryptography')}"]
    assert (MATERIALS["bomFormat"], MATERIALS["specVersion"]) == ("CycloneDX", "1.6")


def test_the_same_installation_gives_the_same_bill() -> None:
    assert components() == MATERIALS
