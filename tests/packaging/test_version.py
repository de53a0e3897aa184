"""The version and the habits of the repository: the same version everywhere, and hooks that run what `make check` runs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.packaging.checkout import ROOT, pyproject


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
