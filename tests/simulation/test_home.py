"""A simulation in a folder: homes as over the network, which can be verified, and the same bits after an interruption."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import attune
from attune.common import faults
from attune.common.errors import HomeBusy, HomeMismatch, SettingError
from attune.fedclient.model.artifact import Model
from attune.fedserver.cli import cli
from attune.simulation.result import SimulationResult
from tests.forked import STEADY, Forked
from tests.simulation.test_simulate import CLOUDS, QUICK

SETTINGS = QUICK | {"round.clients": 2, "round.evaluate_every": 1}


class Interrupted(Exception):
    pass


def run(home: Path, method: str, until: int = 10**9, rounds: int = 3) -> SimulationResult:
    """Run a simulation that breaks off after `until` orders."""
    orders = 0

    def count(share: float) -> None:
        nonlocal orders
        orders += 1
        if orders > until:
            raise Interrupted

    return attune.simulate(CLOUDS, method, "dnn", rounds=rounds, settings=SETTINGS, home=home, progress=count, baseline="local")


def to_be_killed() -> None:
    """Run in the process that the test below kills."""
    run(Path(sys.argv[0]), "fedmcsa")


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedper"])
def test_an_interrupted_simulation_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = attune.simulate(CLOUDS, method, "dnn", rounds=3, settings=SETTINGS, baseline="local")
    home = tmp_path / "home"
    for until in (1, 1, 4, 0):
        with pytest.raises(Interrupted):
            run(home, method, until)
    resumed = run(home, method)
    assert resumed.digests == whole.digests
    assert list(resumed.table()) == list(whole.table())
    again = run(home, method)
    assert again.digests == whole.digests, "a simulation that is over is shown again"
    assert list(again.table()) == list(whole.table())


def test_a_killed_simulation_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = attune.simulate(CLOUDS, "fedmcsa", "dnn", rounds=3, settings=SETTINGS, baseline="local")
    for fault in ("server:2:aggregated=kill", "site1:2:state-written=kill", "*:3:order-committed=kill"):
        environment = os.environ | STEADY | {faults.VARIABLE: fault}
        with (tmp_path / "log").open("ab") as log:
            process = Forked([str(tmp_path / "home")], log, log, environment, f"{__name__}:to_be_killed")
        assert process.wait(60) == -signal.SIGKILL, fault
    assert run(tmp_path / "home", "fedmcsa").digests == whole.digests


def test_the_homes_are_those_of_the_network(tmp_path: Path) -> None:
    result = run(tmp_path, "fedmcsa", rounds=1)
    shown = CliRunner().invoke(cli, ["status", "--home", str(tmp_path / "server"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output) == json.loads(json.dumps(result.status))
    x, _ = CLOUDS["site0"]
    assert Model.load(tmp_path / "devices" / "site0" / "model").predict(x) == result.model("site0").predict(x)


def test_a_home_belongs_to_its_settings(tmp_path: Path) -> None:
    run(tmp_path, "fedavg", rounds=1)
    with pytest.raises(HomeMismatch, match=r"method.name is 'fedavg' here, not 'fedmcsa'"):
        run(tmp_path, "fedmcsa", rounds=1)


def test_a_home_is_one_simulation_at_a_time(tmp_path: Path) -> None:
    def again(share: float) -> None:
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path)

    with pytest.raises(HomeBusy):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path, progress=again)


def test_with_a_home_a_model_must_have_a_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="found by its name"):
        attune.simulate(CLOUDS, "fedavg", model=lambda spec: None, rounds=1, home=tmp_path)


def test_a_simulated_home_is_whole_and_damage_of_it_is_found(tmp_path: Path) -> None:
    attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path)
    [database] = tmp_path.rglob("state.sqlite")
    home = database.parent
    result = CliRunner().invoke(cli, ["verify", "--home", str(home)])
    assert (result.exit_code, result.output) == (0, f"{home} is whole\n")
    [state, *_] = sorted((home / "state").glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1])
    result = CliRunner().invoke(cli, ["verify", "--home", str(home)])
    assert result.exit_code == 4
    assert state.name in result.output
