"""The tree of classes by hand; its leaves share all the probability."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.contrib.gp.objective import class_tree, members


def tree_of(places, classes=8):
    """Return the tree of classes with these means: two points on either side of each."""
    features = torch.tensor([[place + step, 0.0] for place in places.values() for step in (-0.1, 0.1)], dtype=torch.float64)
    return class_tree(features, torch.tensor([label for label in places for _ in range(2)]), classes).tolist()


def test_alike_classes_stay_together():
    """Use means at 0, 1, 9 and 10: {2, 5} against {3, 7} first, whatever the order of their numbers."""
    assert tree_of({2: 0.0, 3: 10.0, 5: 1.0, 7: 9.0}) == [
        [0, 0, 1, -1, 0, 1, 0, -1],
        [0, 0, 1, 0, 0, -1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, -1],
    ]


def test_a_class_moves_to_the_nearer_centre():
    """Use 0 and 10, which are furthest apart; 5.2 starts with 10. Their centre is 7.6, that of the others is 3.4: it moves."""
    assert tree_of(dict(enumerate([0.0, 4.4, 4.5, 4.7, 5.2, 10.0])), 6) == [
        [1, 1, 1, 1, 1, -1],
        [1, -1, -1, -1, -1, 0],
        [0, 1, 1, 1, -1, 0],
        [0, 1, 1, -1, 0, 0],
        [0, 1, -1, 0, 0, 0],
    ]


def test_two_classes_and_one():
    assert tree_of({6: 3.0, 1: -2.0}) == [[0, 1, 0, 0, 0, 0, -1, 0]]
    assert class_tree(torch.ones(3, 2), torch.tensor([4, 4, 4]), 8).shape == (0, 8)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_means_that_coincide_or_are_no_numbers_are_halved_in_order(value):
    assert tree_of(dict.fromkeys((1, 2, 3), value), 4) in (
        [[0, 1, -1, -1], [0, 0, 1, -1]],
        [[0, 1, 1, -1], [0, 1, -1, 0]],
    )


def test_members_by_hand():
    side = torch.tensor([0, 0, -1, 0, 0, 1, 0, -1])
    index, sign = members(torch.tensor([7, 2, 5, 4, 5, 7]), side)
    assert index.tolist() == [0, 1, 2, 4, 5] and sign.tolist() == [-1.0, -1.0, 1.0, 1.0, -1.0]
    assert sign.dtype == torch.float64
    nobody, no_sign = members(torch.tensor([1, 1]), side)
    assert len(nobody) == len(no_sign) == 0


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_every_class_is_a_leaf_and_the_leaves_share_one(classes, seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (30,), generator=draw)
    tree = class_tree(torch.randn(30, 3, generator=draw, dtype=torch.float64), labels, classes)
    present = labels.unique()
    assert tree.shape == (len(present) - 1, classes)
    chance = torch.zeros(classes, dtype=torch.float64).index_fill_(0, present, 1.0)
    for side, turn in zip(tree, torch.rand(len(tree), generator=draw, dtype=torch.float64), strict=True):
        assert (side == 1).any() and (side == -1).any()
        chance[side == 1] *= turn
        chance[side == -1] *= 1 - turn
    assert float(chance.sum()) == pytest.approx(1.0, abs=1e-12)
    for one in present:
        for other in present[present > one]:
            apart = tree[:, one] * tree[:, other] == -1
            assert int(apart.sum()) == 1, "exactly one node tells two classes apart"
