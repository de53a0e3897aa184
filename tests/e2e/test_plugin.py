"""A federation by components of another package, in real processes: who refuses, and that every command works with them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import attune
from attune.common.plan import Plan
from attune.fedserver.home import ServerHome
from tests.e2e.harness import IN_AGGREGATION, Federation, FederationAt, tabular_shard
from tests.plugins.installed import NAME, install, with_package

METHOD = "fedadam+la"
ALLOWED = ("--allow-plugin", NAME)
SMALL = ("--model", "dnn", "--rounds", "2", "--set", "train.local_epochs=1")


def digests(federation: Federation) -> dict[str, str]:
    """Return the digest of each slot of the server."""
    return {slot.key: slot.digest for slot in ServerHome(federation.home).snapshot().slots}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the package, and yield its folder. This process finds it too, because it reads homes."""
    target = install(tmp_path_factory.mktemp("plugin"))
    sys.path.insert(0, str(target))
    yield target
    sys.path.remove(str(target))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [
        tabular_shard(folder / name, seed, classes=classes)
        for seed, (name, classes) in enumerate({"anna": (0, 1), "ben": (1, 2)}.items())
    ]


@pytest.fixture(scope="module")
def finished(federation_at: FederationAt, site: Path, shards: list[Path]) -> Iterator[Federation]:
    """Two devices that allowed the package; the server was killed in an aggregation, and started again."""
    federation = federation_at("plugin")
    federation.environment = with_package(federation.environment, site)
    flags = ("--method", METHOD, "--min-clients", "2", *SMALL)
    server = federation.server(*flags, fault=IN_AGGREGATION)
    devices = federation.devices(shards, *ALLOWED)
    server.await_fault()
    server.kill()
    again = federation.server("--exit-when-done", *flags)
    assert [process.code() for process in (*devices, again)] == [0, 0, 0], again.text
    yield federation


def test_a_device_takes_part_only_with_leave_and_with_the_package(
    federation_at: FederationAt, site: Path, shards: list[Path]
) -> None:
    federation = federation_at("refusals")
    without = federation.environment
    federation.environment = with_package(without, site)
    server = federation.server("--method", METHOD, "--min-clients", "2", *SMALL)
    waiting = federation.device(shards[0], *ALLOWED)
    refusing = federation.device(shards[1])
    assert refusing.code() == 2
    said = f"code of the plug-in {NAME} 0.1.0: if you trust it, install it .* and start with --allow-plugin {NAME}$"
    server.wait_for(f" device=ben ben takes no part: .*{said}")
    federation.environment = without
    lacking = federation.device(shards[1], *ALLOWED)
    assert lacking.code() == 2
    server.wait_for(f" ben takes no part: the plug-in {NAME} 0.1.0 is not installed here: pip install '{NAME}==0.1.0'")
    assert federation.status()["round"] == 0, "before round 1 was closed"
    federation.environment = with_package(without, site)
    allowed = federation.device(shards[1], *ALLOWED)
    assert (waiting.code(), allowed.code()) == (0, 0)


def test_the_plan_lists_the_package_and_every_device_is_served_adams_value(finished: Federation, shards: list[Path]) -> None:
    plans = [path.read_bytes() for path in finished.folder.glob("attune/devices/*/*/plan.json")]
    plan = msgspec.json.decode(plans[0], type=Plan)
    assert plans[0] == plans[1] and (plan.plugins, plan.returns) == ({NAME: "0.1.0"}, {"shared": "values"})
    assert set(digests(finished)) == {"first-moment", "second-moment", "value"}


def test_a_simulation_has_the_bits_of_the_network(finished: Federation, shards: list[Path], tmp_path: Path) -> None:
    folders = [str(shard) for shard in shards]
    attune.simulate(folders, METHOD, "dnn", 2, settings={"train.local_epochs": 1}, home=tmp_path)
    simulated = {slot.key: slot.digest for slot in ServerHome(tmp_path / "server").snapshot().slots}
    assert simulated == digests(finished)


def test_commands_of_the_server_work_with_it(finished: Federation, site: Path) -> None:
    status = json.loads(finished.command("fedserver", "status", "--json").stdout)
    assert (status["method"], status["phase"], status["round"]) == (METHOD, "done", 2)
    out = finished.folder / "out"
    finished.command("fedserver", "plot", "--out", str(out / "pictures"))
    finished.command("fedserver", "export", "--out", str(out / "exported"))
    summary = json.loads((out / "exported" / "summary.json").read_bytes())
    assert summary["settings"]["method.adaptivity"] == 1e-3 and summary["settings"]["method.strength"] == 1.0
    assert METHOD in finished.command("fedserver", "compare", str(out / "exported"), str(finished.home)).stdout


def test_commands_of_a_device_work_with_it(finished: Federation, shards: list[Path]) -> None:
    model = finished.model(shards[0])
    assert json.loads((model / "model.json").read_bytes())["plugins"] == {NAME: "0.1.0"}
    at = ("--home", str(model.parent))
    assert "accuracy" in finished.command("fedclient", "evaluate", "--data", str(shards[0]), *at).stdout
    labels = finished.folder / "labels.csv"
    finished.command("fedclient", "predict", "--data", str(shards[0] / "test.npz"), "--out", str(labels), *at)
    assert len(labels.read_text().splitlines()) >= len(np.load(shards[0] / "test.npz")["x"])
    finished.command("fedclient", "plot", "--data", str(shards[0]), "--out", str(finished.folder / "drawn"), *at)


def test_a_finished_model_without_the_package_says_what_to_install(finished: Federation, shards: list[Path]) -> None:
    environment = finished.environment
    finished.environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    model = finished.model(shards[0])
    done: Any = finished.command("fedclient", "evaluate", "--data", str(shards[0]), "--home", str(model.parent), code=2)
    finished.environment = environment
    assert f"the plug-in {NAME} 0.1.0 is not installed here: pip install '{NAME}==0.1.0'" in done.stderr
