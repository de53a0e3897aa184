"""Code of packages on devices: a plan lists the packages, and a device refuses them before it loads anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.errors import SettingError, WireError
from attune.common.methods.registry import configured_in, configured_on_device
from attune.common.methods.settings.aggregators import AggregatorSettings
from attune.common.plan import Plan, Profile
from attune.fedclient.address import ServerAddress
from attune.fedclient.limits import accept_plan
from attune.fedclient.options import DeviceOptions
from attune.fedserver.consent import code_in
from attune.fedserver.core.planning import make_plan, resolve

PROFILE = Profile("tabular", (3,), [0, 1], 10, 4)
CUSTOM = {"method": {"name": "custom", "parts": {"*": "shared"}, "aggregators": {"shared": "demo"}, "server_lr": 0.25}}


class NoStore:
    """The store of a device that has no plan yet."""

    where = "home"

    def plan(self) -> None:
        return None


def refused_or_not(plan: Plan, *allowed: str) -> None:
    accept_plan(plan, NoStore(), DeviceOptions(Path(), ServerAddress("localhost", 1), allow_plugins=allowed))  # type: ignore[arg-type]


def plan_of(settings: dict[str, Any]) -> Plan:
    return make_plan(resolve(settings), {"a": PROFILE, "b": PROFILE}, "f")


def forget() -> None:
    sys.modules.pop("demo_plugin", None)


def test_a_plan_without_plug_ins_has_the_bytes_that_it_had() -> None:
    text = msgspec.json.encode(plan_of({"method": {"name": "fedavg"}}))
    assert b"plugins" not in text and b"returns" not in text


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
    ],
)
def test_a_server_cannot_have_code_loaded_that_its_plan_does_not_list(install: Any, change: dict[str, Any]) -> None:
    install("demo-plugin")
    hostile = msgspec.structs.replace(plan_of({"method": {"name": "fedavg"}}), **change)
    with pytest.raises(WireError, match="the server's plan uses the plug-in demo-plugin, which it does not list"):
        refused_or_not(hostile, "demo-plugin")
    assert "demo_plugin" not in sys.modules


def test_a_server_cannot_have_a_model_loaded_that_its_plan_does_not_list(install: Any) -> None:
    install("demo-plugin")
    plan = plan_of({"method": {"name": "fedavg"}})
    hostile = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, name="demo"))
    with pytest.raises(WireError, match="uses the plug-in demo-plugin"):
        refused_or_not(hostile)
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
