"""Grids of a user's own rows: equal for all methods that have the key, and chosen on parts of the training data alone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attune
from attune.common.errors import AttuneError, SettingError, ShardError
from attune.fedserver.cli import cli
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.grid import best, parse_grid
from attune.simulation.validation import validation_members


def test_each_method_tries_every_combination_of_the_keys_that_it_has() -> None:
    grid = parse_grid(["method.mu=0.1, 1", "train.lr=0.01,0.1", "round.train=all"], ["fedavg", "fedprox"])
    assert grid["fedavg"] == [("train.lr=0.01", "round.train=all"), ("train.lr=0.1", "round.train=all")]
    assert grid["fedprox"] == [
        (lr, "round.train=all", mu) for lr in ("train.lr=0.01", "train.lr=0.1") for mu in ("method.mu=0.1", "method.mu=1")
    ]
    assert parse_grid(["model.hidden=[8],[16, 8]"], ["local"])["local"] == [("model.hidden=[8]",), ("model.hidden=[16, 8]",)]
    assert parse_grid(["method.mu=1,1,2"], ["fedprox", "local"]) == {
        "fedprox": [("method.mu=1",), ("method.mu=2",)],
        "local": [()],
    }


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["train.lr"], "--grid takes section.key=VALUE,VALUE"),
        (["lr=1,2"], "--grid takes section.key=VALUE,VALUE"),
        (["fedprox:method.mu=1,2"], "for all methods that have the key"),
        (["train.lr=1,2", "train.lr=3"], "--grid train.lr comes twice"),
        (["method.sigma=10,50"], "none of fedavg, fedprox has this setting"),
    ],
)
def test_a_wrong_grid_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("(", r"\(")):
        parse_grid(texts, ["fedavg", "fedprox"])


def test_of_equal_settings_the_first_is_chosen() -> None:
    assert best({("a=1",): 0.5, ("a=2",): 0.7, ("a=3",): 0.7}) == ("a=2",)


def numbered(samples: int, groups: bool = False) -> tuple[np.ndarray, ...]:
    """Return data whose samples are numbers: training samples from 0 on, test samples from 1,000 on."""
    x = np.arange(samples, dtype=float)[:, None]
    return x, np.arange(samples) % 2, x[:8] + 1000, np.full(8, 2)


def test_validation_parts_are_cut_from_training_parts_and_keep_the_classes() -> None:
    members = read_shards(data_by_name({"a": numbered(40), "b": numbered(12)}))
    cut = validation_members(members, seed=1)
    a, b = (cut[name].load() for name in "ab")
    assert sorted([*a.train_x[:, 0], *a.test_x[:, 0]]) == list(range(40)) and len(a.test_x) == 10
    assert np.bincount(a.test_y).tolist() == [5, 5] and a.labels == [0, 1, 2], "class 2 is only in the real test part"
    assert len(b.test_x) == 0 and len(b.train_x) == 12, "too few samples to hold some out"
    again = validation_members(members, seed=1)["a"].load()
    assert (again.test_x == a.test_x).all() and (validation_members(members, seed=2)["a"].load().test_x != a.test_x).any()
    with pytest.raises(ShardError, match="no device has 20 training samples"):
        validation_members({"b": members["b"]}, seed=1)


def test_groups_are_never_divided(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for part, n in (("train", 40), ("test", 8)):
        groups = np.arange(n) // 4
        np.savez(folder / f"{part}.npz", x=np.random.default_rng(0).normal(size=(n, 2)), y=np.arange(n) % 2, person=groups)
    (folder / "meta.json").write_text('{"groups": "person"}')
    cut = validation_members(read_shards(data_by_name([folder])), seed=0)["a"].load()
    assert cut.groups is not None and cut.test_groups is not None and len(cut.test_groups) >= 8
    assert not set(cut.groups) & set(cut.test_groups)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make shards whose training labels follow the features, and whose test labels say the opposite."""
    folder = tmp_path_factory.mktemp("shards")
    for n in range(2):
        (folder / f"site{n}").mkdir()
        rng = np.random.default_rng(n)
        y = rng.integers(0, 2, 60)
        x = rng.normal(size=(60, 3)) + 4 * y[:, None]
        np.savez(folder / f"site{n}" / "train.npz", x=x, y=y)
        np.savez(folder / f"site{n}" / "test.npz", x=x, y=1 - y)
    return str(folder / "*")


def run(data: str, *words: str) -> Result:
    done = CliRunner().invoke(cli, ["simulate", "--data", data, "--rounds", "2", "--model", "mlr", *words])
    if isinstance(done.exception, AttuneError):
        done.exit_code, done.output_bytes = done.exception.exit_code, done.output_bytes + str(done.exception).encode()
    return done


def test_settings_are_chosen_on_parts_of_the_training_data(data: str, tmp_path: Path) -> None:
    """Choose between a rate that learns, which is the worst on the reversed test parts, and one that learns nothing."""
    done = run(data, "--method", "local,fedprox", "--grid", "train.lr=1e-9,0.1", "--grid", "method.mu=0.01,0.02",
               "--out", str(tmp_path), "--seeds", "3,4")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "local: train.lr=0.1, the best of 2 on validation parts of the training data" in done.output
    assert "fedprox: train.lr=0.1 method.mu=0.0" in done.output
    with (tmp_path / "grid.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["local"] * 2 + ["fedprox"] * 4
    scores = {row["settings"]: float(row["kept"]) for row in rows if row["method"] == "local"}
    assert scores["train.lr=0.1"] > 0.9 > scores["train.lr=1e-9"]
    settings = {"train.lr": 0.1, "model.name": "mlr"}
    result = attune.simulate(data, "local", rounds=2, seeds=(3, 4), settings=settings, progress=False)
    assert max(result.means().values()) < 0.2, "the test parts say the opposite, and had no say"
    means = [line.split() for line in done.output.splitlines() if line.startswith("mean  ")]
    table = result.table()
    assert means[0][2:5] == ["local", *str(table.rows[-1][table.heads.index("kept")]).split()[:2]]


def test_a_single_value_is_used_without_a_trial(data: str) -> None:
    done = run(data, "--method", "local,fedprox", "--grid", "method.mu=0.5")
    assert done.exit_code == 0 and "on validation parts" not in done.output, done.output
    assert "fedprox: method.mu=0.5, without a choice" in done.output
    assert "local: none of the settings of the grid, without a choice" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grid", "train.lr=0.1,-1"), "train.lr"),
        (("--grid", "train.lrr=0.1,1"), "did you mean 'lr'"),
        (("--grid", "train.lr"), "--grid takes"),
        (("--benchmark", "digits", "--grid", "train.lr=1,2"), " no --grid"),
    ],
)
def test_a_wrong_grid_ends_it_before_any_training(data: str, words: tuple[str, ...], said: str) -> None:
    done = run(data, "--method", "local", *words)
    assert done.exit_code == 2 and said in done.output and "on validation parts" not in done.output, done.output
