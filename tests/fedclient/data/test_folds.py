"""Folds: each sample in one, groups whole, blocks of neighbours, classes spread evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.fedclient.data import holdout
from attune.fedclient.data.holdout import FEWEST, FOLDS, folds_of

NONE = np.zeros(0, np.intp)


@given(st.lists(st.integers(0, 3), min_size=FEWEST, max_size=60), st.sampled_from(["tabular", "images", "series"]))
def test_every_sample_is_in_a_fold_and_classes_are_even(label, kind):
    label = np.array(label)
    fold = folds_of(label, kind, None, NONE)
    assert set(fold) == set(range(FOLDS)) or kind == "series"
    if kind != "series":
        counts = np.array([np.bincount(fold[label == each], minlength=FOLDS) for each in np.unique(label)])
        assert (counts.max(axis=1) - counts.min(axis=1)).max() <= 1 and np.ptp(np.bincount(fold, minlength=FOLDS)) <= 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=10, max_size=60))
def test_groups_stay_whole(rows):
    group, label = (np.array(column) for column in zip(*rows, strict=True))
    fold = folds_of(label, "tabular", group, NONE)
    if len(set(group)) < FEWEST:
        assert fold is None
    else:
        assert all(len(set(fold[group == each])) == 1 for each in set(group)) and set(fold) == set(range(FOLDS))


def test_neighbours_in_time_lie_in_one_block():
    assert folds_of(np.arange(10) % 2, "series", None, NONE).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    runs = np.repeat([5, 7], 10)  # a recording of activities: each class has blocks of its own
    assert folds_of(runs, "series", None, NONE).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] * 2


def test_few_samples_have_no_folds():
    assert folds_of(np.zeros(FEWEST - 1), "tabular", None, NONE) is None


def test_of_many_samples_some_are_in_folds_and_first_those_that_are_held_out(monkeypatch):
    monkeypatch.setattr(holdout, "MOST_SAMPLES", 20)
    first = np.array([3, 50, 97])
    fold = folds_of(np.arange(100) % 4, "tabular", None, first)
    assert (fold >= 0).sum() == 20 and (fold[first] >= 0).all() and set(fold[fold >= 0]) == set(range(FOLDS))


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_the_same_each_time(seed):
    label = np.random.default_rng(seed).integers(0, 3, 40)
    assert (folds_of(label, "images", None, NONE) == folds_of(label, "images", None, NONE)).all()
