"""The settings of every predictor by name; importable without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from attune.common.config import Count, CountOrZero, Positive
from attune.common.plugins import PluginRegistry

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0, le=1)]


class PredictorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that every predictor has, and what is known of it without torch.

    Attributes:
        needs_features: The predictor reads the inputs of the head, so the model must have one.
        own_model: The device predicts with a model of its own, and with no part of the shared one.
        reads_samples: The device uses its samples once more before it predicts, without noise.
        only_classes: Why it can predict nothing but classes, and what to take instead; empty if it can.
        implementation: The class of a predictor that is not built in, or "package.module:Class".
    """

    implementation: ClassVar[str | type] = ""
    needs_features: ClassVar[bool] = False
    own_model: ClassVar[bool] = False
    reads_samples: ClassVar[bool] = True
    only_classes: ClassVar[str] = ""


class ModelSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The model itself has nothing to set."""

    reads_samples: ClassVar[bool] = False


class FineTuneSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """Training on the device's own samples before it predicts: docs/methods/fedavg+ft.md."""

    # Epochs of this training.
    tune_epochs: Count = 1
    # Mini-batch steps instead of epochs. 0: by epochs.
    tune_steps: CountOrZero = 0
    # Learning rate of this training. none: `train.lr`.
    alpha: Positive | None = None


class OwnModelPredictorSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The device's own model has nothing to set."""

    own_model: ClassVar[bool] = True
    reads_samples: ClassVar[bool] = False


class TwoHeadsPredictorSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The sum of both heads has nothing to set."""

    needs_features: ClassVar[bool] = True


class DomainBiasPredictorSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The shift of the features has nothing to set: docs/methods/feddbe.md."""

    needs_features: ClassVar[bool] = True


class KnnSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The nearest of the device's own training samples: docs/methods/fedtp+knn.md."""

    needs_features: ClassVar[bool] = True
    only_classes: ClassVar[str] = "neighbours vote for classes. Take fedtp"
    # Number of nearest training samples that vote. More than the device has: all.
    neighbours: Count = 10
    # Weight of the neighbours; the rest is the model's. 0: only the model. 1: only the neighbours.
    knn_weight: Fraction = 0.6
    # Share of the training samples that the device remembers; at least one sample.
    capacity: PositiveShare = 1.0


class ClosedFormPredictorSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """The weights that a device solves for have nothing to set: docs/methods/analytic.md."""


SETTINGS: PluginRegistry[type[PredictorSettings]] = PluginRegistry(
    "predictors",
    PredictorSettings,
    {
        "model": ModelSettings,
        "fine-tune": FineTuneSettings,
        "knn": KnnSettings,
        "own-model": OwnModelPredictorSettings,
        "two-heads": TwoHeadsPredictorSettings,
        "domain-bias": DomainBiasPredictorSettings,
        "closed-form": ClosedFormPredictorSettings,
    },
)
