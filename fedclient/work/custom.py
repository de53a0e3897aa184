"""Measure of a task of one's own, by functions in the module of the model; and the measure of any plan.

B samples, G ways of scoring the same samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attune.common.errors import SettingError
from attune.common.plan import ModelSpec, Plan
from attune.common.plugins import own_measure
from attune.common.task import ScoredTask
from attune.fedclient.work.areas import Areas
from attune.fedclient.work.comparison import LOWEST
from attune.fedclient.work.measures import MEASURES, Measure, ScoresAnswer


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
        raise SettingError("a task of your own has no squared error: no ordinary models can be fitted for it")

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
