"""Choice of the training samples that are held out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.fedclient.data.holdout import hold_out


def test_of_every_class_a_tenth():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    fit, held = hold_out(labels, 0.1, 5, "images")
    assert np.bincount(labels[held]).tolist() == [10, 5, 1]
    assert len(fit) == 144


def test_of_few_samples_or_without_a_share_nothing():
    assert hold_out(np.zeros(19, dtype=int), 0.5, 0, "images")[1].tolist() == []
    assert len(hold_out(np.zeros(20, dtype=int), 0.5, 0, "images")[1]) == 10
    assert hold_out(np.zeros(500, dtype=int), 0.0, 0, "images")[1].tolist() == []
    assert [part.tolist() for part in hold_out(np.zeros(0, dtype=int), 0.1, 0, "images")] == [[], []]


def test_labels_of_every_position_count_by_the_last():
    last = np.repeat([0, 1], [60, 40])
    labels = np.stack([np.arange(100) % 7, last], axis=1)
    assert np.bincount(last[hold_out(labels, 0.2, 1, "images")[1]]).tolist() == [12, 8]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=20, max_size=120), st.floats(0, 0.9), st.integers(0, 99))
def test_each_sample_is_on_one_side_and_classes_keep_their_proportions(classes, share, seed):
    labels = np.array(classes)
    fit, held = hold_out(labels, share, seed, "images")
    assert sorted([*fit, *held]) == list(range(len(labels)))
    assert len(held) == round(share * len(labels))
    expected = share * np.bincount(labels, minlength=6)
    assert (abs(np.bincount(labels[held], minlength=6) - expected) < 2).all()
    again = hold_out(labels, share, seed, "images")
    assert np.array_equal(fit, again[0]) and np.array_equal(held, again[1])


def neighbours(held, runs):
    """Count the held-out samples with a neighbour in the same run that is trained on."""
    mask = np.zeros(len(runs), dtype=bool)
    mask[held] = True
    beside = np.zeros(len(runs), dtype=bool)
    beside[1:] |= ~mask[:-1] & (runs[1:] == runs[:-1])
    beside[:-1] |= ~mask[1:] & (runs[1:] == runs[:-1])
    return int((beside & mask).sum())


def recording(rng, activities=6, segments=5, windows=10):
    """Return labels and segments of a recording: runs of one activity each, every activity several times."""
    order = rng.permutation(np.repeat(np.arange(activities), segments))
    lengths = rng.integers(windows - 4, windows + 5, len(order))
    return np.repeat(order, lengths), np.repeat(np.arange(len(order)), lengths)


@pytest.mark.parametrize("kind", ["series", "tokens"])
def test_windows_are_held_out_in_unbroken_runs(kind):
    """Compare with a random choice: nearly every held-out window has a neighbour in training with half of its samples."""
    labels, runs = recording(np.random.default_rng(3))
    fit, held = hold_out(labels, 0.1, 0, kind)
    assert abs(len(held) - 0.1 * len(labels)) <= 3 and sorted([*fit, *held]) == list(range(len(labels)))
    assert neighbours(held, runs) <= 0.3 * len(held)
    assert np.unique(labels[held]).tolist() == [0, 1, 2, 3, 4, 5], "of every activity its last"
    assert neighbours(hold_out(labels, 0.1, 0, "images")[1], runs) > 0.9 * len(held)


def test_where_labels_change_from_window_to_window_the_end_is_held_out():
    rng = np.random.default_rng(0)
    assert hold_out(rng.integers(0, 50, 200), 0.1, 0, "tokens")[1].tolist() == list(range(180, 200))
    assert hold_out(rng.integers(0, 50, (200, 8)), 0.1, 0, "tokens")[1].tolist() == list(range(180, 200)), "labels of positions"


@pytest.mark.parametrize("kind", ["series", "images", "tabular"])
def test_whole_groups_are_held_out(kind):
    labels, segments = recording(np.random.default_rng(5))
    fit, held = hold_out(labels, 0.2, 1, kind, segments)
    assert not set(segments[fit]) & set(segments[held])
    assert 0.2 * len(labels) <= len(held) <= 0.2 * len(labels) + 14
    assert len(np.unique(labels[held])) == 6, "one segment of every activity"
    assert (
        held.tolist()
        == hold_out(labels, 0.2, 1, kind, segments)[1].tolist()
        != hold_out(labels, 0.2, 2, kind, segments)[1].tolist()
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=4, max_size=12), st.integers(0, 99))
def test_no_class_is_held_out_as_a_whole(runs, seed):
    """Test few labels: a class has one run of windows, and a device cannot learn a class that it does not train on."""
    y = np.concatenate([[label] * size for label, size in runs])
    groups = np.concatenate([[place] * size for place, (_, size) in enumerate(runs)])
    trained, held = hold_out(y, 0.25, seed, "series", groups)
    assert set(y[trained]) == set(y)
    assert not set(groups[trained]) & set(groups[held])


def test_one_group_alone_is_trained_on():
    assert len(hold_out(np.arange(40) % 2, 0.1, 0, "images", np.zeros(40))[1]) == 0
    names = np.array(["a"] * 30 + ["b"] * 10)
    assert hold_out(np.arange(40) % 2, 0.1, 0, "images", names)[1].tolist() == list(range(30, 40))
