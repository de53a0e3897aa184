"""Studies and their grids: trials, samples and choices are right, and an interrupted study continues."""

from pathlib import Path

import numpy as np
import pytest

from attune.common.config import convert, parse_assignment, read_toml
from attune.common.errors import SettingError
from attune.fedserver.core.planning import resolve
from attune.simulation.grid_search import SHARED
from benchmarks import study
from benchmarks.grid import EVERY_METHOD, Grid, alternatives, chosen

FILES = sorted((Path(study.__file__).parent / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_of_every_study_exist_and_methods_have_equal_choices_of_training(path):
    made = convert(study.Study, read_toml(path), "")
    grid = made.grid
    trials = {method: alternatives(grid, method) if grid else [tuple(made.own.get(method, ()))] for method in made.methods}
    trained = {method: {tuple(s for s in each if s.startswith(SHARED)) for each in found} for method, found in trials.items()}
    assert len(set(map(frozenset, trained.values()))) == 1
    assert set(grid.own if grid else made.own) - {EVERY_METHOD} <= set(made.methods)
    for task in made.task:
        for method, settings in ((method, settings) for method, each in trials.items() for settings in each):
            said: dict = {"method": {"name": method}}
            for key, value in map(parse_assignment, (*made.set, *task.set, *settings)):
                said.setdefault(key[0], {})[key[1]] = value
            assert resolve(said).method.name == method


def test_validation_shards_hold_training_samples_only(tmp_path):
    shard = tmp_path / "task-0" / "shard0"
    shard.mkdir(parents=True)
    x = np.arange(40.0)[:, None]
    np.savez(shard / "train.npz", x=x, y=np.arange(40) % 2)
    np.savez(shard / "test.npz", x=x + 100, y=np.arange(40) % 2)
    (shard / "meta.json").write_text('{"classes": [0, 1]}')
    made = study.validation(tmp_path / "task-0", 0.25, 1) / "shard0"
    train, test = (np.load(made / f"{part}.npz") for part in ("train", "test"))
    assert sorted([*train["x"][:, 0], *test["x"][:, 0]]) == list(range(40))
    assert np.bincount(test["y"]).tolist() == [5, 5], "of every class a quarter"
    assert (made / "meta.json").read_text() == '{"classes": [0, 1]}'


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


def test_a_method_has_at_most_eight_trials():
    assert len(alternatives(grid(own={"*": [[f"method.mu={i}"] for i in range(4)]}), "fedprox")) == 8
    with pytest.raises(SettingError, match="the grid of fedprox has 10 trials; at most 8"):
        alternatives(grid(own={"*": [[f"method.mu={i}"] for i in range(5)]}), "fedprox")


def test_the_best_trial_of_this_grid_is_chosen_by_the_figure_that_is_judged():
    rows = [
        trial("fedavg", TWO, 0.8, 0.7), trial("fedavg", ONE, 0.7, 0.8), trial("fedavg", "train.lr=7", 0.99, 0.99),
        trial("fedavg", ONE, 0.99, 0.99, task="other"), trial("fedavg", TWO, 0.99, 0.99, rounds="50"),
        trial("fedavg", TWO, 0.99, 0.99, seed="4"), trial("fedtp", TWO, 0.99, 0.99),
    ]  # fmt: skip
    assert chosen(rows, grid(), "t", "fedavg") == ("train.lr=0.1", "train.batch_size=32")
    assert chosen(rows, grid(judged="over samples"), "t", "fedavg") == ("train.lr=0.01", "train.batch_size=16")
    same = [trial("fedavg", TWO, 0.8), trial("fedavg", ONE, 0.8)]
    assert chosen(same, grid(), "t", "fedavg") == ("train.lr=0.01", "train.batch_size=16"), "of equal ones the first"
    with pytest.raises(SettingError, match="no trial of fedper on t is known"):
        chosen(rows, grid(), "t", "fedper")
