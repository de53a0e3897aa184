"""Components of other packages by name: those that are found, those that win, and the refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import attune
from attune.common.errors import SettingError, ShardError
from attune.common.methods.method import Method, configure
from attune.common.methods.registry import METHODS, configured_from, get, names
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.aggregators import AggregatorSettings
from attune.common.methods.settings.objectives import SETTINGS as OBJECTIVES
from attune.common.models.registry import MODELS, build, default_spec
from attune.common.plugins import Package, installed
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.work.build import objective_class, predictor_class
from attune.fedclient.work.objectives.sgd import Sgd
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import SharedValue
from attune.fedserver.lab.build import AggregatorSpec, made
from attune.simulation.partition.readers.registry import read


def test_a_method_of_an_installed_package_is_found_with_all_its_components(install: Any) -> None:
    install("demo-plugin", "2.1")
    assert "demo" in METHODS and "demo_plugin" not in sys.modules, "known, and not loaded yet"
    assert METHODS.package_of("demo") == Package("demo-plugin", "2.1") and "demo_plugin" not in sys.modules
    configured = configured_from({"name": "demo", "strength": 2.0, "server_lr": 0.25})
    assert configured.method is sys.modules["demo_plugin"].ROW
    assert (configured.objective.strength, configured.aggregators["shared"].server_lr) == (2.0, 0.25)
    assert objective_class("demo") is Sgd
    assert "demo" in names() and installed() == ("demo-plugin",)


def test_a_model_of_an_installed_package_is_built_with_its_options(install: Any) -> None:
    folder = install(
        "demo-plugin", module="import demo_models\nMODEL = demo_models.MODEL", entries={"models": {"demo": "MODEL"}}
    )
    (folder / "demo_models.py").write_text(
        "from torch import nn\n"
        "from attune.common.models.options import ModelOptions\n"
        "from attune.common.models.registry import ModelEntry\n"
        "class Options(ModelOptions, frozen=True, forbid_unknown_fields=True):\n    width: int = 4\n"
        "def make(spec, options):\n"
        "    return nn.Sequential(nn.Linear(spec.shape[0], options.width), nn.Linear(options.width, spec.classes))\n"
        'MODEL = ModelEntry("demo_models:make", Options, ("tabular",))\n'
    )
    spec = default_spec("tabular", (3,), 2, 0, "demo", {"width": 7})
    assert [tuple(p.shape) for p in build(spec, 0).parameters()] == [(7, 3), (7,), (2, 7), (2,)]
    with pytest.raises(SettingError, match=r"unknown setting model\.widht \(did you mean 'width'"):
        default_spec("tabular", (3,), 2, 0, "demo", {"widht": 7})
    with pytest.raises(SettingError, match="model demo does not take images"):
        default_spec("images", (3, 3, 1), 2, 0, "demo", {})
    sys.modules.pop("demo_models")


def test_a_built_in_name_wins_over_a_package(install: Any) -> None:
    install("demo-plugin", entries={"methods": {"fedavg": "ROW"}})
    assert get("fedavg").citation == "McMahan et al., AISTATS 2017"
    assert METHODS.package_of("fedavg") is None and "demo_plugin" not in sys.modules


def test_two_packages_that_offer_one_name_are_both_named(install: Any) -> None:
    install("demo-plugin")
    install("other-plugin")
    with pytest.raises(SettingError, match=r"demo-plugin and other-plugin both offer 'demo' \(methods\): uninstall one"):
        get("demo")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("ROW = 'no method'", r"the package demo-plugin offers 'demo' \(methods\), which is no Method: 'no method'"),
        ("import no_such_module", r"the package demo-plugin cannot be imported \(demo_plugin:ROW\): ModuleNotFoundError"),
    ],
)
def test_a_package_that_does_not_fit_is_named(install: Any, module: str, message: str) -> None:
    install("demo-plugin", module=module, entries={"methods": {"demo": "ROW"}})
    with pytest.raises(SettingError, match=message):
        get("demo")


def test_a_method_has_the_name_under_which_it_is_offered(install: Any) -> None:
    install("demo-plugin", entries={"methods": {"other": "ROW"}})
    with pytest.raises(SettingError, match="the method 'other' calls itself 'demo'"):
        get("other")


def test_settings_without_a_class_say_what_is_missing(install: Any) -> None:
    install("demo-plugin")
    with pytest.raises(SettingError, match="Predictor, the settings of 'demo', name no implementation"):
        predictor_class("demo")


class Still(SharedValue):
    """Aggregator that never changes its state."""

    def close_round(self, updates: Any) -> dict[str, float]:
        return {}


class StillSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    implementation = Still


def test_a_program_registers_what_it_defines_itself() -> None:
    with pytest.raises(SettingError, match="unknown aggregator 'still'"):
        AGGREGATORS.require("still", "aggregator")
    attune.register("aggregators", "still", StillSettings)
    row = Method(name="stay", citation="of this test", parts=(("*", "shared"),), aggregators={"shared": "still"})
    attune.register("methods", "stay", row)
    configured = configure(get("stay"), {"bound_samples": 0.0})
    assert configured.aggregators["shared"] == StillSettings(bound_samples=0.0)
    assert isinstance(made(AggregatorSpec("shared", "still", configured.aggregators["shared"], 0, {}), MemoryVault()), Still)
    with pytest.raises(SettingError, match=r"method stay has no setting method\.sigma"):
        configure(get("stay"), {"sigma": 1})
    with pytest.raises(SettingError, match=r"unknown group 'aggregator' .*did you mean 'aggregators'"):
        attune.register("aggregator", "still", StillSettings)
    attune.register("objectives", "odd", StillSettings)
    with pytest.raises(SettingError, match=r"attune.register offers 'odd' \(objectives\), which is no ObjectiveSettings"):
        OBJECTIVES["odd"]


def test_an_unknown_name_gets_the_nearest_of_all_that_are_known(install: Any) -> None:
    install("demo-plugin")
    with pytest.raises(SettingError, match=r"unknown method 'dmo' .*did you mean 'demo'"):
        get("dmo")
    with pytest.raises(SettingError, match=r"unknown model 'dmo' .*did you mean 'demo'"):
        default_spec("tabular", (3,), 2, 0, "dmo", {})
    assert "dmo" not in MODELS and MODELS.package_of("dmo") is None


READER = """
import numpy as np
from attune.simulation.partition.readers.assemble import Raw

class Counted:
    def recognises(self, path):
        return path.suffix == ".counted"

    def read(self, path, options):
        numbers = np.arange(float(path.read_text())).reshape(-1, 1)
        return Raw(path.stem, (numbers, (numbers[:, 0] > 3).astype(int)))

READER = Counted()
"""


def test_a_reader_of_an_installed_package_reads_its_form(install: Any, tmp_path: Path) -> None:
    (tmp_path / "ten.counted").write_text("10")
    with pytest.raises(ShardError, match="has no form that can be read"):
        read(tmp_path / "ten.counted", ReadOptions.of("", (), "", "refuse"))
    install("demo-plugin", module=READER, entries={"readers": {"counted": "READER"}})
    data = read(tmp_path / "ten.counted", ReadOptions.of("", (), "", "refuse"))
    assert (data.name, len(data.train_y), data.classes) == ("ten", 10, [0, 1])
    install("other-plugin", module=READER, entries={"readers": {"counted": "READER"}})
    with pytest.raises(SettingError, match="demo-plugin and other-plugin both offer 'counted'"):
        read(tmp_path / "ten.counted", ReadOptions.of("", (), "", "refuse"))
