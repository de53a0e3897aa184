"""The grid: every method has the same choices of training, at most eight trials, and only its own trials choose for it."""

from __future__ import annotations

import pytest

from attune.common.errors import SettingError
from attune.simulation.grid import SHARED
from benchmarks import tables
from benchmarks.grid import Grid, alternatives, chosen

TRAIN = [["train.lr=0.01", "train.batch_size=16"], ["train.lr=0.1", "train.batch_size=32"]]


def grid(**settings: object) -> Grid:
    return Grid(**{"rounds": 5, "seed": 3, "train": TRAIN, **settings})


def trial(method: str, settings: str, mean: float, pooled: float = 0.0, **changed: str) -> dict[str, str]:
    row = {"task": "t", "method": method, "settings": settings, "rounds": "5", "seed": "3"}
    return row | {"validation_accuracy": str(mean), "validation_over_samples": str(pooled)} | changed


ONE, TWO = ("train.lr=0.01 train.batch_size=16", "train.lr=0.1 train.batch_size=32")


def test_every_choice_of_training_is_tried_with_every_alternative_of_the_method():
    made = grid(own={"fedmcsa": [["method.mu=5"], ["method.mu=0", "method.sigma=450"]], "*": [["round.train=all"]]})
    assert [" ".join(each) for each in alternatives(made, "fedavg")] == [f"{one} round.train=all" for one in (ONE, TWO)]
    assert [" ".join(each) for each in alternatives(made, "fedmcsa")] == [
        f"{ONE} method.mu=5",
        f"{ONE} method.mu=0 method.sigma=450",
        f"{TWO} method.mu=5",
        f"{TWO} method.mu=0 method.sigma=450",
    ]
    assert [" ".join(each) for each in alternatives(grid(), "fedavg")] == [ONE, TWO]


@pytest.mark.parametrize("key", SHARED)
def test_a_method_has_no_training_settings_of_its_own(key):
    with pytest.raises(SettingError, match=f"the grid of fedavg sets {key}, which `train` sets for every method alike"):
        alternatives(grid(own={"fedavg": [["method.mu=1"], [f"{key}=0.5"]]}), "fedavg")


def test_a_method_has_at_most_eight_trials():
    assert len(alternatives(grid(own={"*": [[f"method.mu={i}"] for i in range(4)]}), "fedprox")) == 8
    with pytest.raises(SettingError, match="the grid of fedprox has 10 trials; at most 8"):
        alternatives(grid(own={"*": [[f"method.mu={i}"] for i in range(5)]}), "fedprox")


def test_the_best_trial_of_this_grid_is_chosen_by_the_figure_that_is_judged():
    rows = [
        trial("fedavg", TWO, 0.8, 0.7),
        trial("fedavg", ONE, 0.7, 0.8),
        trial("fedavg", "train.lr=7", 0.99, 0.99),
        trial("fedavg", ONE, 0.99, 0.99, task="other"),
        trial("fedavg", TWO, 0.99, 0.99, rounds="50"),
        trial("fedavg", TWO, 0.99, 0.99, seed="4"),
        trial("fedtp", TWO, 0.99, 0.99),
    ]
    assert chosen(rows, grid(), "t", "fedavg") == ("train.lr=0.1", "train.batch_size=32")
    assert chosen(rows, grid(judged="over samples"), "t", "fedavg") == ("train.lr=0.01", "train.batch_size=16")
    same = [trial("fedavg", TWO, 0.8), trial("fedavg", ONE, 0.8)]
    assert chosen(same, grid(), "t", "fedavg") == ("train.lr=0.01", "train.batch_size=16"), "of equal ones the first"
    with pytest.raises(SettingError, match="no trial of fedper on t is known"):
        chosen(rows, grid(), "t", "fedper")


def of_a_table(name: str) -> dict[str, list[tuple[str, ...]]]:
    found = tables.load(name)
    return {row.method: tables.trials(found, row) for row in found.row}


@pytest.mark.parametrize("tried", [of_a_table("fedtp-2-small"), of_a_table("fedmcsa-1")], ids=["FedTP", "FedMCSA"])
def test_tables_of_the_papers_have_the_rivals_that_matter_in_their_grids(tried):
    """Check the rivals: fine-tuning of several depths and rates; FedMCSA without a pull, with a large sigma, by tensors."""
    assert {"local", "fedavg", "fedavg+ft", "fedmcsa"} <= tried.keys()
    tuned = {each for settings in tried["fedavg+ft"] for each in settings if each.startswith("method.")}
    assert len({each.partition("=")[2] for each in tuned if ".tune_" in each}) > 1 and "method.alpha=0.1" in tuned
    published = {"method.mu=0", "method.sigma=450", "method.components=tensor"}
    assert any(published <= set(settings) for settings in tried["fedmcsa"])
