"""Installed packages with components: metadata and modules in a folder on sys.path, as pip would leave them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from attune.common import plugins
from tests.fedclient.work.objectives.conftest import make_task

__all__ = ["install", "make_task", "unregistered"]

Install = Callable[..., Path]
MODULE = """
from typing import ClassVar
from attune.common.config import Positive
from attune.common.methods.method import Method
from attune.common.methods.settings.aggregators import AggregatorSettings
from attune.common.methods.settings.objectives import ObjectiveSettings
from attune.common.methods.settings.objectives import PredictorSettings
from attune.common.models.options import ModelOptions
from attune.common.models.registry import ModelEntry

ROW = Method(name="demo", citation="of this test", parts=(("*", "shared"),), objective="demo", aggregators={"shared": "demo"})


class Change(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    returns = "change"
    server_lr: Positive = 0.5


class Objective(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    implementation: ClassVar[str] = "attune.fedclient.work.objectives.descent:Sgd"
    strength: Positive = 1.0


class Predictor(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    pass


class Options(ModelOptions, frozen=True, forbid_unknown_fields=True):
    width: int = 4


MODEL = ModelEntry("attune.common.models.blocks:make_dnn", Options, ("tabular",), frozenset({"head"}))
"""
ENTRIES = {
    "methods": {"demo": "ROW"},
    "aggregators": {"demo": "Change"},
    "objectives": {"demo": "Objective"},
    "predictors": {"demo": "Predictor"},
    "models": {"demo": "MODEL"},
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package that offers `demo` in every group, or the given components; its module has the package's name."""
    made: list[str] = []

    def put(name: str, version: str = "1.0", entries: Mapping[str, Mapping[str, str]] = ENTRIES, module: str = MODULE) -> Path:
        folder, package = tmp_path / f"site-{name}", name.replace("-", "_")
        about = folder / f"{package}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = [
            "\n".join([f"[attune.{group}]", *(f"{key} = {package}:{value}" for key, value in named.items())])
            for group, named in entries.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(groups))
        (folder / f"{package}.py").write_text(module)
        monkeypatch.syspath_prepend(str(folder))
        made.append(package)
        return folder

    yield put
    for package in made:
        sys.modules.pop(package, None)


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers when it ends."""
    monkeypatch.setattr(plugins, "_registered", {group: {} for group in plugins.GROUPS})
