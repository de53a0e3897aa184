"""The settings of every objective by name, what it needs of the model, and the settings of every predictor. Needs no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from attune.common.config import Count, CountOrZero, Decay, NonNegative, Positive, Probability, TrainSettings
from attune.common.plugins import PluginRegistry


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that every objective has, and what is known of it without torch.

    Attributes:
        keeps_own: The device keeps tensors of its own beside the model's.
        own_stays: They influence nothing that is handed in, so they train without noise.
        uses_head: The classifier head takes part in the training.
        needs_features: The objective reads the inputs of the head, so the model must have one.
        needs_feature_mean: The objective needs the mean of these inputs over all devices (common.models.feature_mean).
        adds_up: Devices hand in sums over their samples, which the server adds up. So all need the same scales, and the owner
            of the data must allow it.
        own_loop: Why a user's own training loop cannot train by it; empty if it can.
        only_classes: Why it can learn nothing but classes, and what to take instead; empty if it can.
        not_private: Why devices cannot train by it with noise (`privacy.unit`); empty if its loss is a mean over samples, each
            used once in a step, beside a term that reads no sample (`Descent.penalty`).
        implementation: The class of an objective that is not built in, or "package.module:Class".
    """

    implementation: ClassVar[str | type] = ""
    keeps_own: ClassVar[bool] = False
    own_stays: ClassVar[bool] = False
    uses_head: ClassVar[bool] = True
    needs_features: ClassVar[bool] = False
    needs_feature_mean: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    own_loop: ClassVar[str] = ""
    only_classes: ClassVar[str] = ""
    not_private: ClassVar[str] = "its objective does not say that its loss is a mean over single samples"

    def private_steps(self, train: TrainSettings, per_epoch: int) -> int:
        """Return how many steps with noise an order takes; `per_epoch`: steps in a pass over the samples."""
        return train.local_steps or train.local_epochs * per_epoch


class SgdSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """The plain loss has nothing to set."""

    not_private: ClassVar[str] = ""


class ProximalSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedProx's mu, which is FedMCSA's lambda; 0 is plain SGD."""

    not_private: ClassVar[str] = ""

    # Strength of the pull towards what the server sent (FedProx's mu, FedMCSA's lambda). 0: the plain loss.
    mu: NonNegative = 0.01


class MamlSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """First-order MAML: docs/methods/per-fedavg.md."""

    own_loop: ClassVar[str] = "its gradient is taken at the end of a trial step, on another batch"
    not_private: ClassVar[str] = "each step uses the samples of two batches"
    # Learning rate of the inner step. none: `train.lr`.
    alpha: Positive | None = None
    # Learning rate of the step that is taken, with the gradient after the inner one. none: `train.lr`.
    beta: Positive | None = None


class MoreauSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """pFedMe: docs/methods/pfedme.md."""

    own_loop: ClassVar[str] = "after each batch a second model follows the first one"
    not_private: ClassVar[str] = "it takes several steps on the samples of each batch"
    keeps_own: ClassVar[bool] = True
    # Strength of the pull (the paper's lambda). 0: the exchanged model never moves.
    mu: NonNegative = 15.0
    # Steps of the personal model on each mini-batch (the paper's K).
    inner_steps: Count = 5
    # Learning rate of these steps. none: `train.lr`.
    personal_lr: Positive | None = None


class OwnModelSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """Ditto: docs/methods/ditto.md."""

    not_private: ClassVar[str] = ""
    keeps_own: ClassVar[bool] = True
    own_stays: ClassVar[bool] = True
    # Strength of the own model's pull towards what the server sent (the paper's lambda). 0: no pull.
    mu: NonNegative = 0.1


class MeanRegularisedSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """MR-MTL: docs/methods/mr-mtl.md."""

    not_private: ClassVar[str] = ""
    keeps_own: ClassVar[bool] = True
    # Strength of a device's model's pull towards the mean of all (the paper's lambda). 0: local training.
    mu: NonNegative = 0.1


class MixtureSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """APFL: docs/methods/apfl.md."""

    not_private: ClassVar[str] = "each step uses the samples for two models"
    keeps_own: ClassVar[bool] = True
    own_loop: ClassVar[str] = "it trains two models and their mixture in the same steps"
    # First share of the device's own model in its mixture with the shared one (the paper's alpha). It is learned from there.
    share: Probability = 0.5


class LocalAggregationSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedALA: docs/methods/fedala.md."""

    not_private: ClassVar[str] = "samples are used before training, to find where it begins"
    keeps_own: ClassVar[bool] = True
    own_loop: ClassVar[str] = "it learns where the training begins before the training"
    # Last layers that begin between the device's own model and what is served. The others begin at what is served.
    layers: Count = 1
    # Learning rate of the weights between the two.
    weight_lr: Positive = 1.0
    # Share of the training samples by which the weights are learned.
    sampled: Decay = 0.8


class DomainBiasSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedDBE: docs/methods/feddbe.md."""

    not_private: ClassVar[str] = "it hands in a mean of features without noise"
    keeps_own: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    needs_feature_mean: ClassVar[bool] = True
    own_loop: ClassVar[str] = "it measures features before the first training, and follows their mean from batch to batch"
    # Strength of the pull of the device's mean features towards those of all devices. 0: no pull.
    kappa: NonNegative = 10.0
    # Weight of a batch in the running mean of features. 1: only the batch counts.
    feature_momentum: Decay = 1.0


class FrozenPrivateSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedBABU has nothing to set: docs/methods/fedbabu.md."""

    not_private: ClassVar[str] = ""
    uses_head: ClassVar[bool] = False  # it is private, and keeps its first value until the device predicts


class AlternatingSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedRep: docs/methods/fedrep.md. Both settings replace train.local_epochs and train.local_steps."""

    not_private: ClassVar[str] = ""
    # Epochs of the private part, with the rest frozen.
    head_epochs: Count = 4
    # Epochs of the rest, with the private part frozen.
    body_epochs: Count = 1

    def private_steps(self, train: TrainSettings, per_epoch: int) -> int:
        return (self.head_epochs + self.body_epochs) * per_epoch


class TwoHeadsSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """FedRoD has nothing to set."""

    not_private: ClassVar[str] = "its loss has the frequency of each class among the device's samples"
    keeps_own: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    only_classes: ClassVar[str] = "one of its heads is corrected by how often each class occurs. Take fedrep, fedper or fedtp"


class SumsSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """Sums for a closed form, which has nothing to train: docs/methods/analytic.md."""

    adds_up: ClassVar[bool] = True
    keeps_own: ClassVar[bool] = True
    own_loop: ClassVar[str] = "it solves for its weights, and trains nothing"
    not_private: ClassVar[str] = "its sums have no noise"


OBJECTIVES: PluginRegistry[type[ObjectiveSettings]] = PluginRegistry(
    "objectives",
    ObjectiveSettings,
    {
        "sgd": SgdSettings,
        "proximal": ProximalSettings,
        "maml": MamlSettings,
        "moreau": MoreauSettings,
        "own-model": OwnModelSettings,
        "mean-regularised": MeanRegularisedSettings,
        "mixture": MixtureSettings,
        "local-aggregation": LocalAggregationSettings,
        "domain-bias": DomainBiasSettings,
        "frozen-private": FrozenPrivateSettings,
        "alternating": AlternatingSettings,
        "two-heads": TwoHeadsSettings,
        "sums": SumsSettings,
    },
)


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


PREDICTORS: PluginRegistry[type[PredictorSettings]] = PluginRegistry(
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
