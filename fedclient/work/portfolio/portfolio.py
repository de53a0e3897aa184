"""Fitted models of a device, how well each predicts samples that it was fitted without, and the choice among them.

N training samples, V of them held out from the networks, C classes, labels or numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import ModelSettings, SgdSettings
from attune.common.models.body import body_of
from attune.common.plan import Plan
from attune.common.task import ScoredTask, TaskName
from attune.fedclient.data.holdout import FOLDS, MOST_SAMPLES, NEIGHBOURS, Folds, folds_of
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.work.blend import leave_one_out
from attune.fedclient.work.calibration import Calibrated, calibrated, sharpened
from attune.fedclient.work.comparison import by_group
from attune.fedclient.work.measures import MEASURES
from attune.fedclient.work.objectives.base import Network
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.orders import OrderStore
from attune.fedclient.work.portfolio.evaluators import Read, evaluator, flattened
from attune.fedclient.work.portfolio.fitting import NAMES, Fit, Samples, Tensors, fits_for
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.trainer import EVALUATION_BATCH, Trainer

OUT_OF_FOLD = "out of fold"  # in a store: the scores of samples that a model was fitted without
VERSION = "1"  # of what is fitted; what another version has fitted is fitted anew


@dataclass(frozen=True)
class FittedModel:
    """Model of a portfolio.

    Attributes:
        tensors: Its state, fitted on all training samples.
        scores: Its scores of each training sample when it was fitted without it, (N, C); NaN where that was not done.
    """

    tensors: Tensors
    scores: Tensor


class Portfolio:
    """Fitted models of a device.

    Args:
        models: The models by name.
        samples: All training samples, in the order of the shard.
        held: Places among them of the samples that are held out from the networks, (V,).
        outputs: C.
        device: Torch device that computes.
        read: Returns the features of samples.
    """

    def __init__(
        self,
        models: Mapping[str, FittedModel],
        samples: Samples,
        held: npt.NDArray[np.intp],
        outputs: int,
        device: torch.device,
        read: Read = flattened,
    ) -> None:
        self._models, self._held, self._measure = models, torch.from_numpy(held), MEASURES[samples.task]
        self._samples, self._outputs, self._device, self._read = samples, outputs, device, read
        self._y = torch.from_numpy(samples.y)
        self.candidates = {
            name: (trainer_of(name, model.tensors, samples.task, outputs, device, read, samples.scored), model.tensors)
            for name, model in models.items()
        }

    def joined(self, models: Mapping[str, FittedModel]) -> Portfolio:
        """Return these models with further ones, which are not the device's alone, so that `chosen` is none of them."""
        together = {**self._models, **models}
        return Portfolio(together, self._samples, self._held.numpy(), self._outputs, self._device, self._read)

    def against(self, scores: Tensor) -> tuple[Calibrated, Portfolio] | None:
        """Return how sure a further model may be, and these models with the same samples held out; None without such samples.

        Args:
            scores: Its scores of all training samples when it was made without each one, (N, C); NaN where that was not done.
        """
        told_N = self._told & scores.isfinite().all(dim=1)
        if not self._measure.by_sample or not told_N.any():
            return None
        beside = copy(self)
        beside._held = told_N.nonzero().flatten()
        return self._calibrated(scores[told_N], self._y[told_N]), beside

    @cached_property
    def _told(self) -> Tensor:
        """Mask of the samples that tell models apart, (N,): predicted out of fold, and not the only one of their class."""
        told_N = self._predicted.clone()
        if self._y.dim() == 1 and len(self._y):
            told_N &= self._y.bincount()[self._y] > 1
        return told_N

    @property
    def _predicted(self) -> Tensor:
        """Mask of the samples that every model has predicted out of fold, (N,)."""
        return torch.stack([model.scores.isfinite().all(dim=1) for model in self._models.values()]).all(dim=0)

    @cached_property
    def fits(self) -> dict[str, Calibrated]:
        """Sharpness of each model, and its probabilities of the labels that tell models apart; empty without such labels."""
        if not self._measure.by_sample or not self._told.any():
            return {}
        return {name: self._calibrated(of.scores[self._told], self._y[self._told]) for name, of in self._models.items()}

    @property
    def gained(self) -> tuple[float, float] | tuple[None, None]:
        """The log-likelihood (nats) that training samples gain by the joined models, out of fold, and its standard error.

        Each sample has the weights that are found without it. The only sample of a class says how often a new sample is of a
        class that the device does not know (Good, Biometrika 1953): alone it can only guess there, among all classes. None
        without joined models, or below two samples (or groups).
        """
        alone = [name for name in self.fits if name in NAMES]
        if not alone or len(alone) == len(self.fits):
            return None, None
        rows, groups = self._predicted, self._samples.groups
        group_V = None if groups is None else np.unique(groups[rows.numpy()], return_inverse=True)[1]
        told_V, together = self._told[rows], {name: self._likelihood(self._shares(name, rows), rows) for name in self.fits}
        with_V = leave_one_out(together, weight=told_V.double(), groups=group_V)
        without_V = leave_one_out({name: together[name] for name in alone}, weight=told_V.double(), groups=group_V)
        least_V = np.where(told_V.numpy(), -np.inf, -math.log(self._outputs))
        gain_G = by_group(with_V - np.maximum(without_V, least_V), group_V)
        return (float(gain_G.sum()), math.sqrt(len(gain_G)) * float(gain_G.std(ddof=1))) if len(gain_G) > 1 else (None, None)

    def _calibrated(self, scores: Tensor, y: Tensor) -> Calibrated:
        """Return how sure a model may be, from scores (M, C) of samples with the answers y (M,) or (M, K)."""
        sharpnesses = self._measure.sharpnesses
        evidence = torch.cat([self._measure.evidence(some, y) for some in sharpened(scores, sharpnesses)])
        return calibrated(sharpnesses, self._measure.likelihood(evidence))

    @cached_property
    def chosen(self) -> str:
        """The model that the device would take alone: the one with the least squared error out of fold, or the simplest.

        Of probabilities this is Brier's score. It chose better than the likelihood or the share of right answers
        (docs/does-it-help.md#alone).
        """
        alone = [name for name in self._models if name in NAMES]
        if not self.fits:
            return alone[0]
        return min(alone, key=lambda name: self._measure.squared_error(self._shares(name, self._told), self._y[self._told]))

    def _shares(self, name: str, rows: Tensor) -> Tensor:
        """Return what a model predicts of training samples out of fold, calibrated: probabilities or numbers."""
        return self._measure.shares(self.fits[name].sharpness * self._models[name].scores[rows])

    def held_out(self, weights: Mapping[str, float]) -> Tensor | None:
        """Return the probability of each held-out label by the models together, out of fold, (V,) or (V, K).

        None if a held-out sample was not predicted out of fold.

        Args:
            weights: Weight of each model.
        """
        shares = torch.stack([weight * self._shares(name, self._held) for name, weight in weights.items()]).sum(dim=0)
        return self._likelihood(shares, self._held) if shares.isfinite().all() else None

    def _likelihood(self, shares: Tensor, rows: Tensor) -> Tensor:
        """Return the probability of each label of these rows, by probabilities or numbers of all outputs, (V,) or (V, K)."""
        evidence = self._measure.evidence(self._measure.scores_of(shares).unsqueeze(0), self._y[rows])
        return self._measure.likelihood(evidence)[0]


def portfolio_of(
    data: Prepared, plan: Plan, store: OrderStore, device: torch.device, read: Read = flattened
) -> Portfolio | None:
    """Return the device's portfolio: from the store, else fitted now and kept there. None without training samples.

    Args:
        data: The device's samples, of a plan for which `DeviceOptions.against_alone` has no reason.
        plan: The plan.
        store: Where fitted models are kept.
        device: Torch device that computes.
        read: Returns the features of samples.
    """
    samples = samples_of(data, plan, device, read)
    if not len(samples.y):
        return None
    outputs, held = len(plan.classes) if plan.task != "survival" else 1, held_of(data)
    digest = _digest_of(samples, plan, held)
    stored = store.fitted(digest)
    if stored is None:
        from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

        with threadpool_limits(1):  # the same bits on every machine
            models = fitted_on(samples, outputs, held)
        store.keep_fitted(digest, _as_tensors(models))
    else:
        models = _from_tensors(stored)
    return Portfolio(models, samples, held, outputs, device, read)


def held_of(data: Prepared) -> npt.NDArray[np.intp]:
    """Return the places in the shard of the samples that are held out from the networks, (V,)."""
    first = len(data.train_x)
    return data.places[first : first + len(data.validation_x)]


def reader_of(network: Network, initial: Tensors) -> Read:
    """Return what reads samples as features: what enters the head of a network with a frozen body, else their own numbers.

    Args:
        network: The plan's network.
        initial: Its tensors before any training, (B, ...) -> (B, D): adapters change nothing yet.
    """
    if body_of(network.model) is None:
        return flattened

    def read(x: Tensor) -> Tensor:
        network.model.eval()
        with torch.no_grad():
            return network.with_features(initial, x)[1].flatten(1)

    return read


def trainer_of(
    name: str, tensors: Tensors, task: TaskName, outputs: int, device: torch.device, read: Read = flattened,
    scored: ScoredTask | None = None,
) -> Trainer:  # fmt: skip
    """Return what evaluates a fitted model, as it evaluates a network."""
    module = evaluator(name, tensors, task, outputs, read)
    predictor = PlainPredictor(ModelSettings())
    return Trainer(module, Sgd(SgdSettings()), predictor, TrainSettings(), device, measure=MEASURES[scored or task])


def fitted_on(samples: Samples, outputs: int, first: npt.NDArray[np.intp]) -> dict[str, FittedModel]:
    """Fit each model of the portfolio, on all samples and without each fold.

    Args:
        samples: The training samples.
        outputs: C.
        first: Samples that are predicted out of fold before others, if there are too many for all.
    """
    folds = folds_of(samples.y if samples.task == "classes" else np.zeros(len(samples.y)), samples.kind, samples.groups, first)
    with_bags = folds is not None and (folds >= 0).all() and samples.groups is None and samples.kind not in NEIGHBOURS
    models = {}
    for name, fit in fits_for(samples).items():
        made, scores = fit(samples), torch.full((len(samples.x), outputs), torch.nan, dtype=torch.float32)
        if with_bags and made.out_of_bag is not None:
            scores = evaluator(name, made.tensors, samples.task, outputs).scores(torch.from_numpy(made.out_of_bag))
        elif folds is not None and samples.task != "survival":
            scores = _out_of_fold(name, fit, samples, folds, scores)
        models[name] = FittedModel(made.tensors, scores)
    return models


def _out_of_fold(name: str, fit: Fit, samples: Samples, folds: Folds, scores: Tensor) -> Tensor:
    """Return scores in which those of each fold are by a model that was fitted on the other folds."""
    outputs = scores.shape[1]
    for fold in range(FOLDS):
        left, rest = np.flatnonzero(folds == fold), np.flatnonzero((folds != fold) & (folds >= 0))
        if len(left) and len(rest):
            model = evaluator(name, fit(samples.part(rest)).tensors, samples.task, outputs)
            scores[left] = model.forward(torch.from_numpy(samples.x[left]))
    return scores


def samples_of(data: Prepared, plan: Plan, device: torch.device, read: Read = flattened) -> Samples:
    """Return all training samples in the order of the shard, also those that are held out from networks."""
    parts = [(data.train_x, data.train_y), (data.validation_x, data.validation_y)]
    parts += [(data.dial.x, data.dial.y)] if data.dial else []
    order = np.argsort(data.places)
    x, y = (torch.cat([part[which] for part in parts]) for which in (0, 1))
    features = [read(some.to(device)).cpu() for some in x.split(EVALUATION_BATCH)] if len(x) else [x.flatten(1)]
    # Features of a body are not pixels, so each has a scale of its own.
    kind = plan.model.kind if read is flattened else "tabular"
    return Samples(torch.cat(features).numpy()[order], y.cpu().numpy()[order], plan.task, kind, data.groups, plan.scored)


def _digest_of(samples: Samples, plan: Plan, held: npt.NDArray[np.intp]) -> str:
    """Return a digest of everything on which the fitted models and their folds depend."""
    made = hashlib.sha256("\0".join([VERSION, plan.task, plan.model.kind, str(len(plan.classes))]).encode())
    some = [held] if len(samples.y) > MOST_SAMPLES else []
    for array in (samples.x, samples.y, *([] if samples.groups is None else [samples.groups]), *some):
        made.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def _as_tensors(models: Mapping[str, FittedModel]) -> Tensors:
    """Return all models as one set of tensors."""
    tensors: Tensors = {}
    for name, model in models.items():
        tensors |= {f"{name}/{key}": tensor for key, tensor in (model.tensors | {OUT_OF_FOLD: model.scores}).items()}
    return tensors


def _from_tensors(tensors: Tensors) -> dict[str, FittedModel]:
    """Return the models of `_as_tensors`."""
    split: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        name, _, part = key.partition("/")
        split.setdefault(name, {})[part] = tensor
    return {name: FittedModel(split[name], split[name].pop(OUT_OF_FOLD)) for name in NAMES if name in split}
