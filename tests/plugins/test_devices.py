"""Components of packages: by name, those that win, and devices that refuse them before anything is loaded."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import attune
from attune.common.errors import SettingError, ShardError, WireError
from attune.common.methods.method import Method, configure
from attune.common.methods.registry import METHODS, configured_from, configured_in, configured_on_device, get, names
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.aggregators import AggregatorSettings
from attune.common.methods.settings.objectives import OBJECTIVES
from attune.common.models.registry import MODELS, build, default_spec
from attune.common.plan import ModelSpec, Plan, Profile
from attune.common.plugins import Package, installed
from attune.fedclient.address import ServerAddress
from attune.fedclient.limits import accept_plan
from attune.fedclient.options import DeviceOptions
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.work.build import objective_class, predictor_class
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedserver.consent import code_in
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import SharedValue
from attune.fedserver.lab.build import made
from attune.simulation.partition.datasets import read

PROFILE = Profile("tabular", (3,), [0, 1], 10, 4)
CUSTOM = {"method": {"name": "custom", "parts": {"*": "shared"}, "aggregators": {"shared": "demo"}, "server_lr": 0.25}}


class NoStore:
    """The store of a device that has no plan yet."""

    where = "home"

    def kept(self, what: str) -> None:
        return None


def refused_or_not(plan: Plan, *allowed: str) -> None:
    accept_plan(plan, NoStore(), DeviceOptions(Path(), ServerAddress("localhost", 1), allow_plugins=allowed))  # type: ignore[arg-type]


def plan_of(settings: dict[str, Any]) -> Plan:
    return make_plan(resolve(settings), {"a": PROFILE, "b": PROFILE}, "f")


def forget() -> None:
    sys.modules.pop("demo_plugin", None)


def test_a_plan_lists_the_packages_whose_code_devices_run(install: Any) -> None:
    install("demo-plugin", "2.1")
    plan = plan_of({"method": {"name": "demo"}, "model": {"name": "mlr"}})
    assert (plan.plugins, plan.returns) == ({"demo-plugin": "2.1"}, {"shared": "change"})
    assert plan_of({"method": {"name": "fedavg"}, "model": {"name": "demo"}}).plugins == {"demo-plugin": "2.1"}
    custom = {"name": "custom", "parts": {"*": "shared"}, "objective": "demo"}
    assert plan_of({"method": custom, "model": {"name": "mlr"}}).plugins == {"demo-plugin": "2.1"}


def test_an_aggregator_alone_needs_nothing_on_devices(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install("demo-plugin")
    plan = plan_of(CUSTOM)
    assert (plan.plugins, plan.returns) == ({}, {"shared": "change"})
    assert configured_in(plan).aggregators["shared"].server_lr == 0.25  # type: ignore[attr-defined]
    there = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    forget()
    refused_or_not(there)
    assert configured_on_device(there).aggregators["shared"].returns == "change"
    assert "demo_plugin" not in sys.modules, "where the package is installed, too, a device does not load it"
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    there = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    refused_or_not(there)
    stand_in = configured_on_device(there).aggregators["shared"]
    assert isinstance(stand_in, AggregatorSettings) and stand_in.returns == "change"
    with pytest.raises(SettingError, match="unknown 'demo'"):
        configured_in(there)


def test_a_device_refuses_a_package_that_it_has_not_allowed_and_loads_none_of_it(install: Any) -> None:
    install("demo-plugin", "2.1")
    plan = plan_of({"method": {"name": "demo"}, "model": {"name": "mlr"}})
    forget()
    with pytest.raises(
        SettingError, match=r"code of the plug-in demo-plugin 2\.1: .*'demo-plugin==2\.1'.*--allow-plugin demo-plugin"
    ):
        refused_or_not(plan, "another")
    assert "demo_plugin" not in sys.modules
    refused_or_not(plan, "Demo_Plugin")


def test_a_device_refuses_another_version_and_a_package_that_is_not_there(install: Any) -> None:
    install("demo-plugin", "2.1")
    plan = plan_of({"method": {"name": "demo"}, "model": {"name": "mlr"}})
    newer = msgspec.structs.replace(plan, plugins={"demo-plugin": "2.2"})
    with pytest.raises(
        SettingError,
        match=r"demo-plugin is needed in version 2\.2, and 2\.1 is installed here: pip install 'demo-plugin==2\.2'",
    ):
        refused_or_not(newer, "demo-plugin")
    absent = msgspec.structs.replace(plan, plugins={"absent": "1.0"})
    with pytest.raises(SettingError, match=r"the plug-in absent 1\.0 is not installed here: pip install 'absent==1\.0'"):
        refused_or_not(absent, "absent")
    with pytest.raises(SettingError, match="demo-plugin is needed in version"):
        configured_in(newer)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "demo"},
        {"method": "custom", "method_options": {"parts": {"*": "shared"}, "objective": "demo"}},
        {"method": "custom", "method_options": {"parts": {"*": "shared"}, "predictor": "demo"}},
        {"model": ModelSpec("demo", "tabular", (3,), 2)},
    ],
)
def test_a_server_cannot_have_code_loaded_that_its_plan_does_not_list(install: Any, change: dict[str, Any]) -> None:
    install("demo-plugin")
    hostile = msgspec.structs.replace(plan_of({"method": {"name": "fedavg"}}), **change)
    with pytest.raises(WireError, match="the server's plan uses the plug-in demo-plugin, which it does not list"):
        refused_or_not(hostile, "demo-plugin")
    assert "demo_plugin" not in sys.modules


@pytest.mark.parametrize("said", [{"a; rm -rf": "1"}, {"../x": "1"}, {"x": "1'; echo"}, {"\x1b[2J": "1"}, {"": ""}])
def test_names_and_versions_that_cannot_be_are_not_repeated_as_commands(said: dict[str, str]) -> None:
    plan = msgspec.structs.replace(plan_of({"method": {"name": "fedavg"}}), plugins=said)
    with pytest.raises(WireError, match="the server names a plug-in that cannot be"):
        refused_or_not(plan, *said)


def test_the_package_of_what_a_home_names_is_known_before_it_is_loaded(install: Any) -> None:
    install("demo-plugin")
    named = [
        CUSTOM,
        {"method": {"name": "demo"}},
        {"model": {"name": "demo"}},
        {"method": {"name": "custom", "objective": "demo"}},
    ]
    assert [code_in(settings) for settings in named] == [{"demo-plugin"}] * 4
    assert "demo_plugin" not in sys.modules


def test_a_component_that_another_package_offers_after_consent_is_refused(install: Any) -> None:
    """The entry point of an allowed package goes, and that of another package takes its name."""
    site = install("demo-plugin", "2.1")
    plan = plan_of({"method": {"name": "fedavg"}, "model": {"name": "demo"}})
    refused_or_not(plan, "demo-plugin")
    (site / "demo_plugin-2.1.dist-info" / "entry_points.txt").write_text("")
    install("other-plugin", "1.0")
    with pytest.raises(WireError, match="other-plugin, which it does not list"):
        refused_or_not(plan, "demo-plugin")
    assert "other_plugin" not in sys.modules


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
    assert isinstance(made("still", configured.aggregators["shared"], MemoryVault(), 0, {}), Still)
    with pytest.raises(SettingError, match=r"method stay has no setting method\.sigma"):
        configure(get("stay"), {"sigma": 1})
    with pytest.raises(SettingError, match=r"unknown group 'aggregator' .*did you mean 'aggregators'"):
        attune.register("aggregator", "still", StillSettings)
    attune.register("objectives", "odd", StillSettings)
    with pytest.raises(SettingError, match=r"attune.register offers 'odd' \(objectives\), which is no ObjectiveSettings"):
        OBJECTIVES["odd"]


class Carried(SharedValue):
    """Aggregator written for 0.3, whose classes got a `carrier` too."""

    def __init__(self, settings: Any, vault: Any, seed: int, components: Any, carrier: Any) -> None:
        super().__init__(settings, vault, seed, components)


def test_an_aggregator_that_takes_other_arguments_is_named() -> None:
    attune.register("aggregators", "carried", type("CarriedSettings", (StillSettings,), {"implementation": Carried}))
    with pytest.raises(SettingError, match=r"'carried' cannot be made of .*missing a required argument: 'carrier'; update"):
        made("carried", StillSettings(), MemoryVault(), 0, {})


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
