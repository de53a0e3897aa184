"""Which training samples are held out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.fedclient.data.holdout import hold_out


def test_of_every_class_a_tenth():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    fit, held = hold_out(labels, 0.1, 5)
    assert np.bincount(labels[held]).tolist() == [10, 5, 1]
    assert len(fit) == 144


def test_of_few_samples_or_without_a_share_nothing():
    assert hold_out(np.zeros(19, dtype=int), 0.5, 0)[1].tolist() == []
    assert len(hold_out(np.zeros(20, dtype=int), 0.5, 0)[1]) == 10
    assert hold_out(np.zeros(500, dtype=int), 0.0, 0)[1].tolist() == []
    assert [part.tolist() for part in hold_out(np.zeros(0, dtype=int), 0.1, 0)] == [[], []]


def test_labels_of_every_position_count_by_the_last():
    last = np.repeat([0, 1], [60, 40])
    labels = np.stack([np.arange(100) % 7, last], axis=1)
    assert np.bincount(last[hold_out(labels, 0.2, 1)[1]]).tolist() == [12, 8]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=20, max_size=120), st.floats(0, 0.9), st.integers(0, 99))
def test_each_sample_is_on_one_side_and_classes_keep_their_proportions(classes, share, seed):
    labels = np.array(classes)
    fit, held = hold_out(labels, share, seed)
    assert sorted([*fit, *held]) == list(range(len(labels)))
    assert len(held) == round(share * len(labels))
    expected = share * np.bincount(labels, minlength=6)
    assert (abs(np.bincount(labels[held], minlength=6) - expected) < 2).all()
    again = hold_out(labels, share, seed)
    assert np.array_equal(fit, again[0]) and np.array_equal(held, again[1])
