"""The settings of the components, and the class of each. This file does not import torch: the server only reads it."""

from __future__ import annotations

from typing import ClassVar

from attune.plugin import AggregatorSettings, ObjectiveSettings, Positive, PredictorSettings, Share, TransformSettings


class FedAdamSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """FedAdam: `method.server_lr` and so on in federation.toml."""

    implementation: ClassVar[str] = "attune_example.fedadam:FedAdam"

    server_lr: Positive = 0.01  # the paper's eta
    beta1: Share = 0.9
    beta2: Share = 0.99
    adaptivity: Positive = 1e-3  # the paper's tau


class LogitAdjustedSettings(ObjectiveSettings, frozen=True, forbid_unknown_fields=True):
    """Logit adjustment in training."""

    implementation: ClassVar[str] = "attune_example.logit_adjusted:LogitAdjusted"
    needs_features: ClassVar[bool] = True  # the objective asks the head for the number of classes
    only_classes: ClassVar[str] = "it corrects how often each class occurs. Take fedadam"

    strength: Positive = 1.0  # the paper's tau


class WithPriorSettings(PredictorSettings, frozen=True, forbid_unknown_fields=True):
    """Logit adjustment in prediction. Both components declare `strength`, so both get what is set."""

    implementation: ClassVar[str] = "attune_example.logit_adjusted:WithPrior"
    needs_features: ClassVar[bool] = True
    only_classes: ClassVar[str] = "it corrects how often each class occurs. Take fedadam"

    strength: Positive = 1.0


class TopShareSettings(TransformSettings, frozen=True, forbid_unknown_fields=True):
    """Sparse updates: `[transforms.top-share]` in federation.toml. With the encoding "zstd" the zeros take little room."""

    implementation: ClassVar[str] = "attune_example.top_share:TopShare"

    share: Share = 0.1  # of the changes of each tensor
