"""Meaning of a task in tensors: the loss, the score of each sample, the likelihood of a right answer, and blending.

B samples of a batch, V held-out samples, C classes, K targets or labels. `scores` are a model's outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from attune.common.errors import SettingError
from attune.common.task import ScoredTask
from attune.fedclient.work.calibration import SHARPNESSES
from attune.fedclient.work.comparison import LOWEST
from attune.fedclient.work.survival import c_index, cox_loss, has_pairs

WORST = 1e30  # of a squared error: squares of it are finite
PRIOR_ERRORS = 3  # squared errors of 1, the variance of the federation, that join those of a model's held-out samples


class Measure(ABC):
    """One task. Methods take scores and y of the same samples, on the same device.

    sharpnesses: factors that scores may be multiplied by to calibrate a model; 1 alone where scores are no probabilities.
    by_sample: whether each sample has a loss and a likelihood. Else `loss` is that of a whole batch.
    one_score: whether `right` is one score of all samples.
    """

    sharpnesses: Sequence[float] = SHARPNESSES
    by_sample = True
    one_score = False

    @abstractmethod
    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss over samples.

        Args:
            scores: The model's outputs.
            y: The labels.
            weight: The weight of each sample, (B,), summing to 1.

        Raises:
            SettingError: As in `check`.
        """

    @abstractmethod
    def check(self, scores: Tensor, y: Tensor) -> None:
        """Check that scores have the shape that y needs. Only a user's model can fail this.

        Raises:
            SettingError: The shapes do not fit.
        """

    @abstractmethod
    def of_scores(self, scores: Tensor) -> Tensor:
        """Return the answers, which are compared with y."""

    @abstractmethod
    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return (B, ...) whose mean over all but the samples is a sample's score; 1 is the best. With one score it is (1,)."""

    def can_score(self, y: Tensor) -> bool:
        """Return whether samples with this y have a score."""
        return len(y) > 0

    @abstractmethod
    def shares(self, scores: Tensor) -> Tensor:
        """Return what is averaged when several models predict together."""

    @abstractmethod
    def of_shares(self, shares: Tensor) -> Tensor:
        """Return the answers of averaged shares."""

    @abstractmethod
    def scores_of(self, shares: Tensor) -> Tensor:
        """Return scores that have these shares."""

    @abstractmethod
    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return what `likelihood` needs of scores (G, B, ...), the same ones in G ways, and y (B, ...): (G, *y.shape)."""

    def likelihood(self, evidence: Tensor) -> Tensor:
        """Return how likely y was by the model, (G, V, ...)."""
        return evidence

    @abstractmethod
    def squared_error(self, shares: Tensor, y: Tensor) -> float:
        """Return the mean over samples of the squared error of shares (B, C); of probabilities it is Brier's score."""

    @abstractmethod
    def constant_likelihood(self, y: Tensor) -> Tensor:
        """Return how likely each of y is by the best constant prediction, in y's shape."""

    @abstractmethod
    def constant(self, trained: Tensor, tested: Tensor) -> float | None:
        """Return the mean score on `tested` of the best constant answer by `trained`; both have samples. None: not known."""


class Classes(Measure):
    """One class for each sample, or for each position: scores (B, ..., C), y (B, ...) int64."""

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return mean_cross_entropy(scores, y, weight)

    def check(self, scores: Tensor, y: Tensor) -> None:
        check_scores(scores, y)

    def of_scores(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        return answers == y

    def shares(self, scores: Tensor) -> Tensor:
        return scores.float().softmax(-1)

    def of_shares(self, shares: Tensor) -> Tensor:
        return shares.argmax(-1)

    def scores_of(self, shares: Tensor) -> Tensor:
        return shares.log()

    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.shares(scores).gather(-1, y.expand(scores.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def squared_error(self, shares: Tensor, y: Tensor) -> float:
        return float((shares - one_hot(y, shares.shape[-1])).square().sum(dim=-1).mean())

    def constant_likelihood(self, y: Tensor) -> Tensor:
        return y.flatten().bincount().double()[y] / y.numel()

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return the score of the most frequent label; of equal ones the first."""
        return float((tested == trained.flatten().bincount().argmax()).double().mean())


class Ranked(Classes):
    """Two classes, scored by the AUROC of the second one. Loss and likelihood are those of classes."""

    one_score = True

    def of_scores(self, scores: Tensor) -> Tensor:
        return self.of_shares(self.shares(scores))

    def of_shares(self, shares: Tensor) -> Tensor:
        return shares[..., 1].double() - shares[..., 0].double()  # tells apart what float32 rounds to a share of 1

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the AUROC, (1,) float64: a C-index of events that all come before the other samples."""
        return torch.tensor([c_index(answers, 1 - y, y)], dtype=torch.float64)

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return 0.5: with equal risks each pair counts half."""
        return 0.5


class _Outputs(Measure):
    """A number for each of K outputs: scores (B, K), y (B, K) float32."""

    def check(self, scores: Tensor, y: Tensor) -> None:
        if scores.shape != y.shape:
            raise SettingError(
                f"the model gives scores of shape {tuple(scores.shape)} for y of shape {tuple(y.shape)}: they must be alike; "
                "change the model's factory (spec.classes is the number of outputs)"
            )

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        self.check(scores, y)
        loss_B = self._each(scores, y).mean(dim=1)
        return loss_B.mean() if weight is None else (loss_B * weight).sum()

    @abstractmethod
    def _each(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each output, (B, K)."""

    def squared_error(self, shares: Tensor, y: Tensor) -> float:
        return float((shares - y).square().mean())


class ScoresAnswer(Measure):
    """Measure whose answers are the model's scores, so that several models predict by their mean."""

    sharpnesses = (1.0,)

    def of_scores(self, scores: Tensor) -> Tensor:
        return scores

    def shares(self, scores: Tensor) -> Tensor:
        return scores.float()

    def of_shares(self, shares: Tensor) -> Tensor:
        return shares

    def scores_of(self, shares: Tensor) -> Tensor:
        return shares


class Numbers(ScoresAnswer, _Outputs):
    """Regression. y is in standard deviations of the federation, about its mean, so a squared error of 1 is that of its mean.

    A sample's score is 1 minus its mean squared error, so the mean score is R2 by the federation's variance.
    """

    def _each(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores - y).square()

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        error_B = (answers.double() - y.double()).square().mean(dim=1)
        return 1 - error_B.nan_to_num(nan=WORST, posinf=WORST).clamp(max=WORST)

    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores.double() - y.double()).square().nan_to_num(nan=WORST, posinf=WORST)

    def likelihood(self, evidence: Tensor) -> Tensor:
        """Return the density of Gaussian noise about the prediction.

        Its variance is the mean of these squared errors and of PRIOR_ERRORS: the errors of a few samples alone would make a
        model that is right by chance too sure.
        """
        sum_1K, samples = evidence.sum(dim=-2, keepdim=True), evidence.shape[-2]
        variance_1K = (sum_1K + PRIOR_ERRORS) / (samples + PRIOR_ERRORS)
        return (-evidence / (2 * variance_1K)).exp() / (2 * math.pi * variance_1K).sqrt()

    def constant_likelihood(self, y: Tensor) -> Tensor:
        return self.likelihood(self.evidence(y.double().mean(dim=0).expand(1, *y.shape), y))[0]

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return the score of the mean of each target."""
        return mean_score(self.right(trained.double().mean(dim=0).expand(len(tested), -1), tested))


class Labels(_Outputs):
    """Several labels, each there or not: y is 0 or 1. A sample's score is the share of its labels that are right."""

    def _each(self, scores: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(scores, y.to(scores.dtype), reduction="none")

    def of_scores(self, scores: Tensor) -> Tensor:
        return scores > 0

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        return answers == (y > 0)

    def shares(self, scores: Tensor) -> Tensor:
        return scores.float().sigmoid()

    def of_shares(self, shares: Tensor) -> Tensor:
        return shares > 0.5

    def scores_of(self, shares: Tensor) -> Tensor:
        return shares.logit()

    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        return torch.where(y > 0, scores.float(), -scores.float()).sigmoid()

    def constant_likelihood(self, y: Tensor) -> Tensor:
        share_K = y.double().mean(dim=0)
        return torch.where(y > 0, share_K, 1 - share_K)

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return the score of the more frequent value of each label; of equal ones 0."""
        return float(self.right(trained.mean(dim=0).expand(len(tested), -1) > 0.5, tested).double().mean())


class Survival(ScoresAnswer):
    """A log hazard for each sample, (B, 1); y (B, 2) has times and events. The loss is Cox's, the score Harrell's C-index."""

    by_sample, one_score = False, True

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        self.check(scores, y)
        if weight is not None:
            raise _no_samples("has no loss of a single sample")
        return cox_loss(scores[:, 0], y[:, 0], y[:, 1])

    def check(self, scores: Tensor, y: Tensor) -> None:
        if scores.shape != (len(y), 1) or y.shape[1:] != (2,):
            raise SettingError(
                f"the model gives scores of shape {tuple(scores.shape)} for times and events of shape {tuple(y.shape)}: "
                "survival needs one score a sample; change the model's factory (spec.classes is the number of outputs)"
            )

    def right(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the C-index, (1,) float64; NaN if `can_score` is false."""
        return torch.tensor([c_index(answers[:, 0], y[:, 0], y[:, 1])], dtype=torch.float64)

    def can_score(self, y: Tensor) -> bool:
        return has_pairs(y[:, 0], y[:, 1])

    def evidence(self, scores: Tensor, y: Tensor) -> Tensor:
        raise _no_samples("gives no likelihood of a single sample")

    def squared_error(self, shares: Tensor, y: Tensor) -> float:
        raise _no_samples("gives no error of a single sample")

    def constant_likelihood(self, y: Tensor) -> Tensor:
        raise _no_samples("gives no likelihood of a single sample")

    def constant(self, trained: Tensor, tested: Tensor) -> float:
        """Return 0.5: with equal risks each comparable pair counts half."""
        return 0.5


def _no_samples(what: str) -> SettingError:
    return SettingError(f"the Cox model of survival {what}: train without what needs it (docs/tables.md#survival)")


MEASURES: dict[ScoredTask, Measure] = {
    "classes": Classes(),
    "regression": Numbers(),
    "multilabel": Labels(),
    "survival": Survival(),
    "ranked": Ranked(),
}


def mean_score(right: Tensor) -> float:
    """Return the mean of `Measure.right` or of a user's scores; LOWEST at least, if scores can be lower."""
    return max(LOWEST, float(right.double().mean()))


def mean_cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over samples, and over positions if every position has a label.

    Args:
        logits: (N, ..., C).
        y: (N, ...).
        weight: The weight of each sample, (N,), as in Batch.

    Raises:
        SettingError: As in `check_scores`.
    """
    check_scores(logits, y)
    if weight is None:
        return cross_entropy(logits.flatten(end_dim=-2), y.flatten())
    loss = logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return (loss.reshape(len(y), -1).mean(dim=1) * weight).sum()


def check_scores(logits: Tensor, y: Tensor) -> None:
    """Check that logits (N, ..., C) score what y (N, ...) labels. Only a user's model can fail this.

    Raises:
        SettingError: The shapes do not fit.
    """
    if logits.shape[:-1] != y.shape:
        raise SettingError(
            f"the model gives scores of shape {tuple(logits.shape)} for labels of shape {tuple(y.shape)}: they must agree "
            "but for a last axis of classes; change the model's factory (spec.per_position tells which labels there are)"
        )
