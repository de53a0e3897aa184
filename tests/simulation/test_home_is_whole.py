"""`fedserver verify` on a simulation's home, which has no authority."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

import attune
from attune.fedserver.cli import cli
from tests.simulation.test_simulate import CLOUDS, QUICK


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
