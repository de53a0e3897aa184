"""Toy transforms as a package of somebody else: a module and metadata in a folder, as pip would leave them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

MODULE = Path(__file__).with_name("toy_transforms.py")
ENTRY_POINTS = "[attune.transforms]\nscale = toy_transforms:ScaleSettings\nmask = toy_transforms:MaskSettings\n"
UNBOUNDED = {"name": "fedavg", "bound_change": 0.0}  # no setting that needs single updates


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the installed package `toy`."""
    folder = tmp_path_factory.mktemp("site")
    about = folder / "toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / MODULE.name).write_text(MODULE.read_text())
    return folder


@pytest.fixture
def toys(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its module, with the package installed here."""
    monkeypatch.syspath_prepend(str(package))
    import toy_transforms

    toy_transforms.CALLS.clear()
    yield toy_transforms
    sys.modules.pop("toy_transforms", None)
