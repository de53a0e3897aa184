"""Dice, IoU and the Dice loss of images, by hand and against scikit-learn; what counts is an image, not a pixel."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score
from torch.nn.functional import cross_entropy

from attune.common.metrics import RIVALS
from attune.fedclient.work.comparison import compared
from attune.fedclient.work.task_measures import Areas, overlap, soft_dice

DICE, IOU = Areas("dice"), Areas("iou")
TRUE = torch.tensor([[[0, 0, 1], [0, 1, 1]], [[2, 2, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
SAID = torch.tensor([[[0, 0, 0], [0, 1, 1]], [[2, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[0, 1, 0], [0, 0, 0]]])


def test_dice_and_iou_by_hand():
    """In image 1, 2 of 3 pixels are right: 4/5, 2/3. In image 2 half of class 2, and a class 1 is not there: (2/3 + 0)/2, 1/4.

    Image 3 is empty and nothing was found: 1. Image 4 is empty and a pixel was found: 0.
    """
    assert DICE.right(SAID, TRUE).tolist() == pytest.approx([4 / 5, 1 / 3, 1, 0])
    assert IOU.right(SAID, TRUE).tolist() == pytest.approx([2 / 3, 1 / 4, 1, 0])


def test_each_class_is_scored_as_scikit_learn_does():
    draw = np.random.default_rng(3)
    true, said = draw.integers(0, 4, (2, 20, 5, 6))
    for ours, theirs in ((False, f1_score), (True, jaccard_score)):
        of_images = [
            np.mean([theirs(t.ravel() == k, s.ravel() == k) for k in (1, 2, 3)]) for t, s in zip(true, said, strict=True)
        ]
        assert overlap(torch.from_numpy(said), torch.from_numpy(true), ours).tolist() == pytest.approx(of_images)


def test_no_images_have_no_score():
    assert overlap(TRUE[:0], TRUE[:0], over_union=False).shape == (0,) and not DICE.can_score(TRUE[:0])


def test_soft_dice_by_hand():
    """Check numbers by hand: class 1 has the probabilities 1/2, 3/4 and 1/4 at three pixels; the first two show it.

    That is (2 * 5/4 + 1) / (3/2 + 2 + 1) = 7/9. An empty image has (0 + 1) / (3/2 + 0 + 1) = 2/5.
    """
    scores = torch.tensor([0.0, math.log(3), -math.log(3)], dtype=torch.float64)
    scores = torch.stack([torch.zeros(3, dtype=torch.float64), scores], dim=-1).view(1, 1, 3, 2).expand(2, 1, 3, 2)
    y = torch.tensor([[[1, 1, 0]], [[0, 0, 0]]])
    assert soft_dice(scores, y).tolist() == pytest.approx([7 / 9, 2 / 5])
    plain = cross_entropy(scores.flatten(end_dim=-2), y.flatten())
    with_dice = Areas("dice", dice_loss=True)
    assert float(with_dice.loss(scores, y)) == pytest.approx(float(plain) + 1 - (7 / 9 + 2 / 5) / 2)
    assert float(DICE.loss(scores, y)) == pytest.approx(float(plain)), "unless it is asked for"
    weight = torch.tensor([0.25, 0.75], dtype=torch.float64)
    by_weight = 0.25 * cross_entropy(scores[0, 0], y[0, 0]) + 0.75 * cross_entropy(scores[1, 0], y[1, 0])
    assert float(with_dice.loss(scores, y, weight)) == pytest.approx(float(by_weight) + 1 - 0.25 * 7 / 9 - 0.75 * 2 / 5)


def test_the_dice_loss_has_the_gradient_of_its_formula():
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 3, 4, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 3, (2, 3, 4), generator=draw)
    assert torch.autograd.gradcheck(lambda values: Areas("dice", dice_loss=True).loss(values, y), scores)


def test_a_constant_answer_is_the_class_that_would_have_scored_best():
    trained = torch.tensor([[[1, 1], [1, 0]], [[2, 1], [1, 0]]])
    assert DICE.constant(trained, TRUE) == pytest.approx((6 / 9 + 0 + 0 + 0) / 4)
    assert DICE.constant(TRUE[2:], TRUE) == pytest.approx((0 + 0 + 1 + 1) / 4), "background alone, where most images are empty"
    assert Areas("classes").constant(TRUE, TRUE) == pytest.approx(19 / 24)


def test_the_likelihood_of_pixels_is_that_of_classes():
    scores = torch.tensor([0.0, math.log(3)]).expand(1, 1, 2, 2, 2)
    assert DICE.evidence(scores, torch.tensor([[[0, 1], [1, 1]]])[:, :2]).flatten().tolist() == pytest.approx(
        [0.25, *[0.75] * 3]
    )


def test_paired_tests_count_images_and_not_pixels():
    """Let 8 images of 100 pixels all be better in every pixel: 2 of the 2^8 signs are as large, whatever the pixels are."""
    for right, rival in (
        (torch.ones(8, 10, 10, dtype=torch.bool), torch.zeros(8, 10, 10, dtype=torch.bool)),
        (torch.full((8,), 0.9, dtype=torch.float64), torch.full((8,), 0.4, dtype=torch.float64)),
    ):
        numbers = compared(right, rival, RIVALS["local"])
        assert numbers["better_than_local"] == 8 and numbers["p_local"] == pytest.approx(2 / 256)
    patients = compared(right, rival, RIVALS["local"], groups=np.arange(8) // 2)
    assert patients["test_groups"] == 4 and patients["p_local"] == pytest.approx(2 / 16)
