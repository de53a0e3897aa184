"""The models with which a device compares its own: the common one, and on request a local one; and which it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from attune.common.methods.settings.objectives import SgdSettings
from attune.common.methods.settings.predictors import ModelSettings
from attune.common.metrics import Choice
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.work.objectives.sgd import Sgd
from attune.fedclient.work.predictors.model import Model
from attune.fedclient.work.trainer import Progress, Seeds, Tensors, Trainer

Candidates = Mapping[Choice, tuple[Trainer, Tensors]]


class Baselines:
    """Both are plain models: trained by SGD, predicting by their own logits.

    Arguments: `model` only says how to compute; `saved` is the local model so far; without it a new one starts if `local`.
    """

    def __init__(self, plan: Plan, model: nn.Module, device: torch.device, saved: Tensors | None, local: bool) -> None:
        self._plan = plan
        self._trainer = Trainer(model, Sgd(SgdSettings()), Model(ModelSettings()), plan.train, device)
        initial = self._initial() if local else {}
        # In the model's order, not that of a file: sums over tensors are folded in it.
        self.local = {name: (saved or initial)[name] for name in initial} if local else None

    def __repr__(self) -> str:
        return f"<Baselines{', with local training' if self.local is not None else ''}>"

    def _initial(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in tensors_of(build(self._plan.model, self._plan.seed)).items()}

    def trained(self, data: Prepared, seeds: Seeds, progress: Progress, cancelled: Callable[[], bool]) -> Tensors | None:
        """The local model after one more order's worth of training; bit by bit what the method `local` does with it."""
        if self.local is None:
            return None
        return self._trainer.train(self.local, {}, data.train_x, data.train_y, seeds, progress, cancelled).tensors

    def candidates(self, common: Tensors) -> Candidates:
        """The models there are, each with what evaluates it.

        common: what a device of which nothing is known is served; the tensors that are not in it are as they began.
        """
        found: dict[Choice, tuple[Trainer, Tensors]] = {}
        if common:
            found["common"] = (self._trainer, self._initial() | common)
        if self.local is not None:
            found["local"] = (self._trainer, self.local)
        return found


def accuracies(candidates: Candidates, data: Prepared) -> dict[Choice, float]:
    """The accuracy of each on the test part; empty without a test part."""
    if not len(data.test_x):
        return {}
    return {name: trainer.evaluate(tensors, data.test_x, data.test_y) for name, (trainer, tensors) in candidates.items()}


def best(candidates: Candidates, data: Prepared) -> Choice:
    """The best on the samples held out of training; without such samples, the personalized model."""
    if not len(data.validation_x):
        return "personalized"
    x, y = data.validation_x, data.validation_y
    return choose({name: trainer.right(tensors, x, y) for name, (trainer, tensors) in candidates.items()})


def choose(right: Mapping[Choice, torch.Tensor]) -> Choice:
    """The personalized model, unless another one is clearly better.

    right: for every model, on the same V validation samples, which it labels rightly, (V,) bool, or (V, T) where each of T
    positions has a label. Clearly: the sum of the differences between two models exceeds one standard error, the root of the
    sum of their squares; with one label a sample, of the number of samples that only one of the two labels rightly. The
    positions of a sequence are not independent, so a sequence has one difference.
    """
    best: Choice = "personalized"
    for name, right_V in right.items():
        gain_V = (right_V.double() - right[best].double()).view(len(right_V), -1).sum(dim=1)
        if float(gain_V.sum()) > math.sqrt(float(gain_V.square().sum())):
            best = name
    return best
