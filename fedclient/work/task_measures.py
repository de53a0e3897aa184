"""Measures of areas in images and of a task of one's own; and which measure a plan has.

B samples, P positions, C classes, G ways of scoring the same samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec, Plan
from attune.common.plugins import own_measure
from attune.common.task import ScoredTask
from attune.fedclient.work.comparison import LOWEST
from attune.fedclient.work.measures import MEASURES, Classes, Measure, ScoresAnswer, mean_score


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


class CustomMeasure(ScoresAnswer):
    """Measure by a user's functions of tensors, of which each gives a number for each of B samples.

    loss(scores, y) is minimised; score(answers, y) is 1 at most, more is better; predict(scores) gives the answers, by default
    the scores; likelihood(scores, y), optional, is a probability or a density.

    Args:
        functions: An object with these functions.
    """

    by_sample = False

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def check(self, scores: Tensor, y: Tensor) -> None:
        if scores.shape[:1] != y.shape[:1]:
            raise SettingError(f"the model gives scores of shape {tuple(scores.shape)} for {len(y)} samples")

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        self.check(scores, y)
        loss_B = self._of_each("loss", scores, y)
        return loss_B.mean() if weight is None else (loss_B * weight).sum()

    def of_scores(self, scores: Tensor) -> Tensor:
        predict = getattr(self._functions, "predict", None)
        answers: Tensor = scores if predict is None else predict(scores)
        return answers

    def of_shares(self, shares: Tensor) -> Tensor:
        return self.of_scores(shares)

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        score_B = self._of_each("score", answers, y).double()
        if bool((score_B > 1).any()):
            raise SettingError(f"Measure.score gave {float(score_B.max()):g}: a score is 1 at most, and 1 is the best")
        return score_B.nan_to_num(nan=LOWEST, neginf=LOWEST)

    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        return torch.stack([self._of_each("likelihood", some, y) for some in scores])

    def squared_error(self, shares: Tensor, y: Tensor) -> float:
        raise SettingError("a task of your own has no squared error")

    def constant_likelihood(self, y: Tensor) -> Tensor:
        """Return zeros, (B,): no constant answer is known, so that every model explains samples better."""
        return torch.zeros(len(y), dtype=torch.float64)

    def constant(self, trained: Tensor, tested: Tensor) -> None:
        """Return None: which answer would be best is not known."""

    def _of_each(self, name: str, given: Tensor, y: Tensor) -> Tensor:
        value = getattr(self._functions, name)(given, y)
        if not isinstance(value, Tensor) or value.shape != y.shape[:1]:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SettingError(f"Measure.{name} must give a tensor with a number for each of {len(y)} samples, not {shape}")
        return value


def measure_of(plan: Plan) -> Measure:
    """Return the measure of a plan. Errors are those of `measure_for`."""
    return measure_for(plan.model, plan.scored, plan.train.loss == "dice")


def measure_for(model: ModelSpec, scored: ScoredTask, dice_loss: bool = False) -> Measure:
    """Return the measure of a model for a task.

    Raises:
        SettingError: A task of one's own, and the model's module has no class Measure.
    """
    if scored == "custom":
        return CustomMeasure(own_measure(model.name))
    return Areas(scored, dice_loss) if model.labels_pixels else MEASURES[scored]
