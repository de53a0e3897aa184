"""The tree of classes by hand, and that its leaves share all the probability."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gp.tree import Split, members, splits


def test_by_hand():
    assert splits([3, 8]) == [Split((3,), (8,))]
    assert splits([2, 5, 7]) == [Split((2,), (5, 7)), Split((5,), (7,))]
    left, right = [Split((0, 1), (4, 6, 9)), Split((0,), (1,))], [Split((4,), (6, 9)), Split((6,), (9,))]
    assert splits([0, 1, 4, 6, 9]) == left + right


@pytest.mark.parametrize("classes", [[], [4]])
def test_fewer_than_two_classes_need_no_decision(classes):
    assert splits(classes) == []


def test_members_by_hand():
    index, sign = members(torch.tensor([7, 2, 5, 9, 5, 7]), Split((5,), (2, 7)))
    assert index.tolist() == [0, 1, 2, 4, 5] and sign.tolist() == [-1.0, -1.0, 1.0, 1.0, -1.0]
    assert sign.dtype == torch.float64
    nobody, no_sign = members(torch.tensor([1, 1]), Split((5,), (2, 7)))
    assert len(nobody) == len(no_sign) == 0


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sets(st.integers(0, 200), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_every_class_is_a_leaf_and_the_leaves_share_one(classes, random):
    ordered = sorted(classes)
    tree = splits(ordered)
    assert len(tree) == len(ordered) - 1
    chance = dict.fromkeys(ordered, 1.0)
    for left, right in tree:
        turn = random.random()
        chance |= {c: chance[c] * turn for c in left} | {c: chance[c] * (1 - turn) for c in right}
    assert math.fsum(chance.values()) == pytest.approx(1.0, abs=1e-12)
    decisions = {c: sum(c in left + right for left, right in tree) for c in ordered}
    assert max(decisions.values()) <= math.ceil(math.log2(len(ordered))) if len(ordered) > 1 else tree == []
