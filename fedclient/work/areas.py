"""Measure of areas in images: Dice and IoU of each image, and the Dice loss.

B samples, P positions, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attune.common.task import ScoredTask
from attune.fedclient.work.measures import Classes, mean_score


class Areas(Classes):
    """Classes of positions, mostly pixels, scored by the overlap of predicted and true areas of each sample.

    The first class is the background, which is not scored. A sample's score is the mean over the other classes that occur in
    its answers or labels. A sample without any scores 1: nothing is there, and nothing was found. Its likelihood is
    that of classes.

    Args:
        score: "dice", twice the area of both over the sum of the areas (Dice, Ecology 1945); "iou", over that of their union
            (Jaccard 1901); "classes", the share of right positions.
        dice_loss: Whether 1 minus the soft Dice is added to the cross-entropy (Isensee et al., nnU-Net, Nature Methods 2021).
    """

    def __init__(self, score: ScoredTask, dice_loss: bool = False) -> None:
        self._score, self._dice_loss = score, dice_loss

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        loss = super().loss(scores, y, weight)
        if not self._dice_loss:
            return loss
        dice_B = soft_dice(scores, y)
        return loss + 1 - (dice_B.mean() if weight is None else (dice_B * weight).sum())

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        return super().right(answers, y) if self._score == "classes" else overlap(answers, y, self._score == "iou")

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return the score of the class that scores best on `trained` as the answer everywhere; of equal ones the first."""
        classes = range(int(trained.max()) + 1)
        best = max(classes, key=lambda one: mean_score(self.right(torch.full_like(trained, one), trained)))
        return mean_score(self.right(torch.full_like(tested, best), tested))


def overlap(answers: Tensor, y: Tensor, over_union: bool) -> Tensor:
    """Return Dice, or IoU, of each sample's areas, (B,) float64, as in Areas: answers and y are (B, ...) int64."""
    score_CB = [answers.new_full((len(y),), math.nan, dtype=torch.float64)]
    for one in range(1, int(max(answers.max(), y.max())) + 1 if y.numel() else 0):
        in_answers, in_y = ((labels == one).reshape(len(y), -1) for labels in (answers, y))
        both_B = (in_answers & in_y).sum(dim=1).double()
        areas_B = in_answers.sum(dim=1) + in_y.sum(dim=1)
        score_CB.append(both_B / (areas_B - both_B) if over_union else 2 * both_B / areas_B)  # NaN where there is no area
    return torch.stack(score_CB).nanmean(dim=0).nan_to_num(1.0)


def soft_dice(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean over all classes but the first of Dice of probabilities, (B,): scores (B, ..., C), y (B, ...).

    A class with probabilities p and labels t, 0 or 1, has (2 sum(p t) + 1) / (sum(p) + sum(t) + 1); the 1 keeps it defined
    where there is no area (Milletari, Navab, Ahmadi, V-Net, 3DV 2016, without its squares).
    """
    p_BPC = scores.softmax(-1)[..., 1:].reshape(len(scores), -1, scores.shape[-1] - 1)
    t_BP1 = y.reshape(len(y), -1, 1)
    t_BPC = t_BP1 == torch.arange(1, scores.shape[-1], device=y.device)
    return ((2 * (p_BPC * t_BPC).sum(dim=1) + 1) / (p_BPC.sum(dim=1) + t_BPC.sum(dim=1) + 1)).mean(dim=1)
