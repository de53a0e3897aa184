"""The closed form of all devices' sums as a device's models: what it hands in, and what it makes of the weights it is served.

He et al., AFL, CVPR 2025; a device's own weights as in arXiv 2508.10732. The letters are those of common.methods.ridge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from attune.common.methods.ridge import (
    COUNTED,
    ERRORS,
    FEWEST,
    GAMMA,
    STRENGTH,
    WEIGHT,
    drawn,
    out_of_fold,
    sums_manifest,
    sums_of,
    targets_of,
    without_own,
)
from attune.common.models.closed_form import PIXELS
from attune.common.models.options import SHARPNESS, ClosedFormOptions
from attune.common.plan import ModelSpec
from attune.fedclient.data.holdout import Folds, folds_of
from attune.fedclient.data.table_encoder import Rescaling
from attune.fedclient.work.portfolio.evaluators import FourierModel, flattened
from attune.fedclient.work.portfolio.fitting import Samples
from attune.fedclient.work.portfolio.portfolio import FittedModel

# Strengths with which a device draws its own weights from those that it is served, by the names of the models.
DRAWS: Mapping[str, float] = {"closed-form-near": 10.0, "closed-form": 1.0, "closed-form-far": 0.1}
NEAREST = next(iter(DRAWS))


class FederatedRidge:
    """Ridge regression on random features, the same on all devices.

    Args:
        spec: The plan's model, for the kind and shape of samples and the number C of outputs.
        samples: All training samples of the device, with their own numbers as features.
        first: Same as in `portfolio.fitted_on`.
        scale: Factor and shift, (I,) each, from the device's numbers to those that all devices have; None: they are the same.
    """

    def __init__(self, spec: ModelSpec, samples: Samples, first: Folds, scale: Rescaling | None = None) -> None:
        options = ClosedFormOptions()
        frequency_IR, phase_R = map(torch.from_numpy, options.drawn(math.prod(spec.shape)))
        if scale is not None:
            factor_I, shift_I = map(torch.from_numpy, scale)
            phase_R = phase_R.double() + shift_I @ frequency_IR.double()
            frequency_IR = frequency_IR.double() * factor_I[:, None]
        pixels = PIXELS if samples.kind == "images" else (0.0, 1.0)
        self._features = {"frequency": frequency_IR, "phase": phase_R, "pixels": torch.tensor(pixels, dtype=torch.float64)}
        self._samples, self._first, self._outputs = samples, first, spec.classes
        flat_NI = (torch.from_numpy(samples.x).flatten(1).double() - pixels[0]) / pixels[1]
        self._Z_ND = options.values(flat_NI, frequency_IR.double(), phase_R.double(), torch)
        self._T_NC = targets_of(torch.from_numpy(samples.y), spec.classes, samples.task == "multilabel")

    def sums(self, one_sum: bool = False) -> dict[str, Tensor]:
        """Return what the device hands in, once. It reports no errors. The argument is that of ridge.sums_manifest."""
        sizes = [self._Z_ND.shape[1]]
        errors = torch.zeros(sums_manifest(self._outputs, sizes, one_sum=one_sum)[ERRORS].shape, dtype=torch.float64)
        return {**sums_of(self._Z_ND, self._T_NC, sizes), ERRORS: errors}

    def models(self, served: Mapping[str, Tensor], given: Mapping[str, Tensor] | None = None) -> dict[str, FittedModel]:
        """Return the models that follow from served weights, by name; none before the server has any sums.

        With a strength of 0 the device has too few samples for weights of its own, and takes the served ones.

        Args:
            served: W without the device's own samples, and the strength; behind masks W and the sum of all devices.
            given: What the device has given to that sum.
        """
        centre_CD, is_one_sum = served[WEIGHT], GAMMA in served
        if not bool(centre_CD.any()):
            return {}
        if is_one_sum and float(served[COUNTED]):
            if not given:  # lost, and what new data would have given is not in the sum
                return {}
            try:
                centre_CD = without_own(served, given)
            except RuntimeError:  # torch.linalg.LinAlgError: the sum is none
                return {}
        if not float(served[STRENGTH]) or (is_one_sum and len(self._T_NC) < FEWEST):
            return {NEAREST: self._model(centre_CD, self._Z_ND @ centre_CD.T)}
        predicted_LNC = self._out_of_fold(centre_CD)
        models = {}
        for (name, strength), predicted_NC in zip(DRAWS.items(), predicted_LNC, strict=True):
            models[name] = self._model(drawn(self._Z_ND, self._T_NC, strength, centre_CD), predicted_NC)
        return models

    def _out_of_fold(self, centre_CD: Tensor) -> Tensor:
        """Return what models without each sample's fold predict of it, (L, N, C); NaN for samples in no fold."""
        samples = self._samples
        labels = samples.y if samples.task == "classes" else np.zeros(len(samples.y))
        folds = folds_of(labels, samples.kind, samples.groups, self._first)
        fold_N = torch.full((len(samples.y),), -1) if folds is None else torch.from_numpy(folds)
        return out_of_fold(self._Z_ND, self._T_NC, fold_N, centre_CD, list(DRAWS.values()))

    def _model(self, W_CD: Tensor, predicted_NC: Tensor) -> FittedModel:
        """Return a model with weights W, which has predicted these values of the training samples, out of fold."""
        factor, task = 1.0 if self._samples.task == "regression" else SHARPNESS, self._samples.task
        tensors = {
            **self._features,
            "weight": factor * W_CD[:, :-1],
            "bias": factor * W_CD[:, -1],
            "classes": torch.arange(self._outputs),
        }
        evaluator = FourierModel(tensors, task, self._outputs, flattened)
        return FittedModel(tensors, evaluator.answers(factor * predicted_NC))
