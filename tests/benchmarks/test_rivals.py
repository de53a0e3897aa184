"""Rivals outside the product: what scikit-learn gives by direct calls or by hand, and what is there is not fitted again."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from attune.fedclient.work.portfolio import fitting
from attune.simulation.simulate import simulate
from benchmarks import rival_models, rivals
from benchmarks.recipes.catalogue import ALONE_ENTRY, get
from benchmarks.rival_models import CHOSEN, FOREST, LINEAR, MARGIN, NEAREST, NEAREST_3, RIDGE, VECTORS, device_scores

Parts = Mapping[str, tuple[Any, Any]]


def shard(folder: Path, parts: Parts, more: Mapping[str, Any] | None = None, **meta: Any) -> Path:
    """Write x and y of the parts, and other arrays of the training part."""
    folder.mkdir(parents=True)
    for part, (x, y) in parts.items():
        others = more or {} if part == "train" else {}
        np.savez(folder / f"{part}.npz", x=np.asarray(x), y=np.asarray(y), **{k: np.asarray(v) for k, v in others.items()})
    (folder / "meta.json").write_bytes(msgspec.json.encode(meta))
    return folder


def column(values: Sequence[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


def stripes(per_stripe: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples near 0, 10, 20 and 30 of the classes 0, 1, 0 and 1, which no line can divide."""
    near = np.concatenate([10 * stripe + np.linspace(0, 1, per_stripe) for stripe in range(4)])
    return column(near.tolist()), np.repeat([0, 1, 0, 1], per_stripe)


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forests have three trees, where they are not looked at."""
    monkeypatch.setattr(rival_models, "RandomForestClassifier", partial(RandomForestClassifier, n_estimators=3))


def test_digits_are_what_direct_calls_give(tmp_path: Path) -> None:
    recipe = get("digits")
    folders = recipe.points[1].write(tmp_path / "shards", recipe.load(None, 0), 0)[:1]
    train, test = (np.load(folders[0] / f"{part}.npz") for part in ("train", "test"))
    x, new_x = (part["x"].reshape(len(part["y"]), 64) / 255 for part in (train, test))
    assert rival_models.read(folders[0]).train_x == pytest.approx(x)
    one_scale, new_one_scale = ((each - x.mean()) / x.std() for each in (x, new_x))
    right = {
        LINEAR: LogisticRegression(max_iter=1000).fit(one_scale, train["y"]).score(new_one_scale, test["y"]),
        NEAREST: KNeighborsClassifier(1).fit(x, train["y"]).score(new_x, test["y"]),
        NEAREST_3: KNeighborsClassifier(3).fit(x, train["y"]).score(new_x, test["y"]),
        FOREST: RandomForestClassifier(random_state=0).fit(x, train["y"]).score(new_x, test["y"]),
        VECTORS: SVC(C=MARGIN).fit(x, train["y"]).score(new_x, test["y"]),
    }
    [(name, found)] = device_scores(folders).items()
    assert name == folders[0].name and {**right, CHOSEN: found[CHOSEN]} == pytest.approx(found)
    assert len(set(right.values())) > 2  # so that one cannot stand for another


@pytest.mark.usefixtures("few_trees")
def test_a_device_chooses_out_of_fold_without_a_look_at_its_test_part(tmp_path: Path) -> None:
    """Give stripes to train on, and a test part that is right for a line alone: 0 up to 20, and 1 above."""
    turned = [0] * 6 + [1] * 2
    folder = shard(tmp_path / "a", {"train": stripes(10), "test": (column([0, 1, 2, 3, 10, 11, 20, 21]), turned)})
    [found] = device_scores([folder]).values()
    # Neighbours: 0, 0, 0, 0, 1, 1, 0, 0, so half of these are right.
    assert (found[LINEAR], found[NEAREST], found[CHOSEN]) == (1.0, 0.5, 0.5)


def test_folds_keep_groups_together_and_runs_of_a_series_in_blocks() -> None:
    y, groups = np.tile([0, 1], 30), np.repeat(np.arange(12), 5)
    for task, labels in (("classes", y), ("regression", y[:, None] / 2), ("multilabel", y[:, None])):
        for cut in (groups, None):
            found = rival_models.folds(labels, task, "tabular", cut)
            assert len(found) == 5 and sorted(np.concatenate([outer for _, outer in found])) == list(range(60))
            for inner, outer in found:
                assert not set(inner) & set(outer) and len(inner) + len(outer) == 60
                assert cut is None or not set(cut[inner]) & set(cut[outer])
        blocks = rival_models.folds(labels, task, "series", None)
        assert [sorted(outer) for _, outer in blocks] == [list(range(12 * at, 12 * at + 12)) for at in range(5)]
    assert len(rival_models.folds(y[:6], "classes", "tabular", None)) == 3  # three samples of a class are in three folds


def test_numbers_have_the_r2_of_the_federation_and_the_error_of_their_unit(tmp_path: Path) -> None:
    """Two schools that know 0 and 4 alone, so a variance of 4, answer 0 and 4.

    The squared errors are 1 and 9, so 1 - 1/4 and 1 - 9/4; and 4: 1 - 4/4. School c has no test part, and no variance.
    """
    one = shard(
        tmp_path / "a", {"train": (column([1, 2]), [0.0, 0.0]), "test": (column([1, 2]), [1.0, 3.0])}, task="regression"
    )
    two = shard(tmp_path / "b", {"train": (column([1, 2]), [4.0, 4.0]), "test": (column([1]), [2.0])}, task="regression")
    results = rival_models.rival_results([one, two])
    assert list(results["a"]) == [RIDGE, NEAREST, NEAREST_3, FOREST, CHOSEN]
    assert device_scores([one, two]) == {"a": dict.fromkeys(results["a"], -0.25), "b": dict.fromkeys(results["b"], 0.0)}
    row = next(row for row in rivals.rows_of({"recipe": "two"}, results) if row["rival"] == CHOSEN)
    assert row == {"recipe": "two", "rival": CHOSEN, "mean": -0.125, "pooled": round(-0.5 / 3, 4), "devices": 2, "seconds": 0.0,
                   "mse": 4.6667}  # fmt: skip


@pytest.mark.usefixtures("few_trees")
def test_each_of_several_labels_has_a_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = np.stack([x[:, 0] > 0, x[:, 1] + x[:, 2] > 0, np.ones(60)], axis=1).astype(np.float64)
    folder = shard(tmp_path / "a", {"train": (x[:40], y[:40]), "test": (x[40:], y[40:])}, task="multilabel")
    [found] = device_scores([folder]).values()
    scaled = (x - x[:40].mean(axis=0)) / x[:40].std(axis=0)
    with pytest.warns(UserWarning, match="present in all"):
        direct = OneVsRestClassifier(LogisticRegression(max_iter=1000)).fit(scaled[:40], y[:40]).predict(scaled[40:])
    assert found[LINEAR] == pytest.approx((direct == y[40:]).mean())
    assert found[CHOSEN] == found[LINEAR] > found[NEAREST]


def test_medians_of_what_is_fitted_take_the_place_of_missing_values(tmp_path: Path) -> None:
    """Fit a column with the median 2, and the mean 30.6, which is nearest to 50. A second column has no value."""
    gap = np.nan
    train = np.array([[value, gap] for value in (0, 1, 2, 50, 100)], dtype=np.float32)
    parts = {"train": (train, [0, 0, 1, 0, 0]), "test": (np.full((1, 2), gap, dtype=np.float32), [1])}
    empty = {"train": (column([gap] * 3), [0, 0, 1]), "test": (column([gap]), [0])}
    folders = [shard(tmp_path / "a", parts, missing="median"), shard(tmp_path / "b", empty, missing="median")]
    found = device_scores(folders)
    assert found["a"][NEAREST] == 1.0 == found["b"][LINEAR]


def test_a_devices_own_portfolio_is_as_good_as_scikit_learn_outside(tmp_path: Path, monkeypatch) -> None:
    """Compare what devices choose alone on digits with 20 samples, two seeds: within one point, on average."""
    monkeypatch.setattr(fitting, "TREES", 100)  # tests/conftest.py has another number
    recipe = get("digits")
    point = next(point for point in recipe.points if point.x == 20)
    ours, outside = [], []
    for seed in range(2):
        shards = point.write(tmp_path / str(seed), recipe.load(None, seed), seed)
        scores = device_scores(shards, seed)
        entry = ALONE_ENTRY
        result = simulate(
            [str(shard) for shard in shards], entry.method, None, 1, seed, {**recipe.settings, **entry.settings}, "alone",
            progress=False,
        )  # fmt: skip
        ours.append(fmean(client["accuracy_alone"] for client in result.status["clients"]))
        outside.append(fmean(of[CHOSEN] for of in scores.values()))
    assert fmean(ours) >= fmean(outside) - 0.01, (ours, outside)
