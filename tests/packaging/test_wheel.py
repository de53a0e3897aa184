"""Content of the wheel: everything that runs, and no other files."""

from __future__ import annotations

import configparser
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

from tests.packaging.checkout import pyproject, shipped


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
