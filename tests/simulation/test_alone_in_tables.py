"""Ordinary models alone in the tables of simulations, by numbers that are put into the devices' last reports by hand."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import attune
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedserver.choosing.candidates import ComparedMethod
from attune.simulation.comparison_table import comparison, comparison_over_seeds, method_table
from attune.simulation.over_seeds import SeedResults
from attune.simulation.result import SimulationResult
from tests.fedclient.conftest import tabular_shard

ALONE = {"site0": (1, 11), "site1": (12, 0)}  # test samples on which what is kept is better, and worse
Results = Mapping[str, SimulationResult]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for seed, name in enumerate(ALONE):
        tabular_shard(folder / name, seed=seed, samples=24)
    return folder


@pytest.fixture(scope="module")
def members(shards: Path) -> dict[str, LazyShard]:
    return {name: LazyShard.on_disk(shards / name) for name in ALONE}


@pytest.fixture(scope="module")
def plain(shards: Path) -> dict[str, SimulationResult]:
    """Return results without ordinary models."""
    return simulated(shards)


@pytest.fixture(scope="module")
def compared(shards: Path) -> dict[str, SimulationResult]:
    """Return results whose devices say that ordinary models alone have 0.875."""
    results = simulated(shards)
    for result in results.values():
        for name, (better, worse) in ALONE.items():
            said = {
                "accuracy_alone": 0.875,
                "kept_better_than_alone": better,
                "kept_worse_than_alone": worse,
                "test_samples": 40,
            }
            result._outcome.results[name] = msgspec.structs.replace(result._outcome.results[name], **said)
    return results


def simulated(shards: Path) -> dict[str, SimulationResult]:
    said: dict[str, Any] = {"rounds": 1, "settings": {"train.local_epochs": 1}, "baseline": "none", "progress": False}
    return {method: attune.simulate(f"{shards}/*", method, **said) for method in ("fedavg", "fedper")}


def table_of(results: Results, members: Mapping[str, LazyShard]) -> list[str]:
    return comparison([ComparedMethod(name, {}) for name in results], results, members)


def column(lines: list[str], head: str, first: str) -> list[str]:
    """Return the cells below a head in the rows that begin with a word; columns are at least two spaces apart."""
    heads = re.split(r"  +", lines[1].strip())
    return [re.split(r"  +", line.strip())[heads.index(head)] for line in lines if line.startswith(first)]


def test_ordinary_models_alone_are_a_rival_of_each_method(compared: Results, members: Mapping[str, LazyShard]) -> None:
    lines = table_of(compared, members)
    assert column(lines, "alone", "site") == ["0.875"] * 4
    assert column(lines, "harmed", "site0") == ["yes", "yes"]
    assert column(lines, "harmed", "site1")[0] == "no"
    leaves = "what fedavg leaves this device or than the best ordinary model alone (scikit-learn)"
    assert f"harmed: what is kept is worse than {leaves}, by more than chance" in lines
    assert sum("what devices keep against the best ordinary model alone (scikit-learn): " in line for line in lines) == 2
    assert any(line.startswith("alone: of the best ordinary model (scikit-learn)") for line in lines)


def test_one_method_is_compared_with_all_that_its_devices_compared(compared: Results, members: Mapping[str, LazyShard]) -> None:
    lines = table_of({"fedavg": compared["fedavg"]}, members)
    assert column(lines, "harmed", "site") == ["yes", "no"] and column(lines, "verdict", "site") == ["worse", "better"]
    assert "harmed: what is kept is worse than the best ordinary model alone (scikit-learn), by more than chance" in lines


def test_without_them_no_table_has_their_column(plain: Results, members: Mapping[str, LazyShard]) -> None:
    lines = table_of(plain, members)
    assert not any("alone" in line.split() for line in lines[:2])
    assert not any(line.startswith("alone: ") or "ordinary model alone" in line for line in lines)
    table = plain["fedper"].table()
    assert not {"alone", "local"} & set(str(table).splitlines()[0].split())
    assert "alone" not in table.to_csv().splitlines()[0] and "alone" in table.to_pandas().columns
    seeds = SeedResults({0: plain["fedper"]})
    assert "alone" not in seeds.table().heads and "alone" not in method_table({"fedper": seeds}).heads


def test_devices_and_seeds_have_their_accuracy(compared: Results, members: Mapping[str, LazyShard], tmp_path: Path) -> None:
    table = compared["fedper"].table()
    assert [row.alone for row in table] == [0.875] * 2 and table.mean("alone") == 0.875
    heads, *rows = [line.split() for line in str(table).splitlines()]
    assert heads[2] == "alone" and [row[2] for row in rows[:2]] == ["0.875"] * 2 and rows[2][1] == "0.875"
    of = {method: SeedResults({0: result}) for method, result in compared.items()}
    assert of["fedper"].means("alone") == {0: 0.875}
    assert [str(row[2]) for row in of["fedper"].table().rows] == ["0.875"] * 3
    listed = method_table(of)
    assert [str(row[listed.heads.index("alone")]) for row in listed.rows] == ["0.875"] * 2
    lines = comparison_over_seeds([ComparedMethod(name, {}) for name in of], of)
    assert "alone" in lines[1].split() and any(line.startswith("alone: of the best ordinary model") for line in lines)
    rows_of_file = (compared["fedper"].save(tmp_path / "out") / "table.csv").read_text().splitlines()
    assert rows_of_file[0].startswith("device,samples,alone,local,") and rows_of_file[1].split(",")[2] == "0.875"
