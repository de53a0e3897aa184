"""pyproject.toml against the checkout: the list of packages, and the names of the distribution and its extras."""

from __future__ import annotations

import re
from pathlib import Path

from tests.packaging.checkout import NOT_SHIPPED, ROOT, files, package_folders, pyproject


def test_every_folder_with_an_init_file_is_listed() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {".".join(("attune", *folder.parts)) for folder in package_folders()}


def test_no_module_lies_in_a_folder_without_an_init_file() -> None:
    folders = package_folders()
    modules = [path for path in files() if path.suffix == ".py" and path.parts[0] not in NOT_SHIPPED]
    assert len(modules) > 100
    written = Path("fedserver/starter/project")  # files for `fedserver new`, not modules
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
