"""The settings of every aggregator by name, and what devices hand in to it; importable without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from attune.common.config import Count, NonNegative, Positive, Share
from attune.common.plugins import PluginRegistry

Sigma = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # finite, so that sigma * cosine is
Returns = Literal["values", "change"]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0, le=1)]
Minority = Annotated[float, msgspec.Meta(ge=0, lt=0.5)]
Robust = Literal["none", "clip", "median", "trimmed-mean", "multi-krum"]
VOTES = ("median", "trimmed-mean", "multi-krum")  # in which devices outvote one another


class AggregatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that every aggregator has, and what is known of it without torch.

    Attributes:
        returns: What a device hands in of a part: its values, or their change from what was served.
        implementation: The class of an aggregator that is not built in, or "package.module:Class".
    """

    returns: ClassVar[Returns] = "values"
    implementation: ClassVar[str | type] = ""

    bound_change: NonNegative = 3.0  # an update's change, in median norms of change of its cohort; 0: no bound
    bound_samples: NonNegative = 5.0  # what an update may weigh, in median sample counts of its cohort; 0: no bound

    @property
    def bound(self) -> float:
        """The bound on changes in force, in median norms; 0: none."""
        return self.bound_change

    @property
    def no_vote(self) -> float:
        """Above so many median norms a change does not count at all; 0: each counts."""
        return 0.0

    @property
    def embeddings(self) -> Literal["none", "trained", "fixed"]:
        """Whether clients have embeddings from which their values are generated, and whether these are trained."""
        return "none"


class ChangeElsewhere(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Stand-in on a device for a plug-in aggregator of the server to which devices hand in changes."""

    returns: ClassVar[Returns] = "change"


class ClippedSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Of aggregators in which what one device changes can be clipped, or be outvoted: docs/security.md."""

    robust: Robust = "none"
    clip: Positive = 1.0  # where `robust` clips: the largest norm of a change, in median norms of the cohort

    @property
    def clips(self) -> bool:
        return self.robust == "clip"

    @property
    def bound(self) -> float:
        return min(self.bound_change or self.clip, self.clip) if self.clips else self.bound_change

    @property
    def no_vote(self) -> float:
        """Made as small as the others, an extreme would hide among those that a vote compares."""
        return self.bound_change if self.robust in VOTES else 0.0


class MixedSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Of aggregators that mix a cohort's values by weights: docs/security.md."""

    attention_cap: Cap = 1.0  # the largest weight on another client; what is above it goes to oneself
    self_floor: Fraction = 0.0  # the smallest weight on oneself


class MeanSettings(ClippedSettings, frozen=True, forbid_unknown_fields=True):
    """Weighted mean: docs/methods/fedavg.md."""

    attackers: Minority = 0.2  # the share of a cohort against which "trimmed-mean" and "multi-krum" hold

    uniform: bool = False  # every client of the cohort counts the same, instead of by its samples
    server_mix: Positive = 1.0  # pFedMe's beta: how far the server's value moves towards the cohort's mean


class AttentionSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """MCSA: docs/methods/fedmcsa.md. sigma = 0 is the mean; sigma -> infinity leaves each client its own value."""

    sigma: Sigma = 50.0
    components: Literal["layer", "tensor"] = "layer"  # "tensor": each tensor by itself, as the published code (E4)
    weighting: Literal["none", "samples"] = "none"  # "samples": attention times data share, as the published code (E4)
    dial: bool = False  # in evaluations each device chooses, by component, among the mean, this value and its own


class HeurAmpSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """HeurFedAMP: docs/methods/heurfedamp.md."""

    self_weight: Fraction = 0.25  # 1 / (M + 1), with M other clients of the same distribution
    sigma: Sigma = 50.0


class AmpSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """FedAMP: docs/methods/fedamp.md."""

    sigma: Positive | Literal["auto"] = "auto"  # "auto": the median squared distance of the cohort's pairs
    step: Fraction = 1.0  # of the way to where all others weigh as one's own: alpha * S / sigma in the paper's letters


class HypernetworkSettings(ClippedSettings, frozen=True, forbid_unknown_fields=True):
    """FedTP's hypernetwork and its optimiser on the server: docs/methods/fedtp.md."""

    returns: ClassVar[Returns] = "change"

    @property
    def clips(self) -> bool:
        """Changes of generated weights have no coordinates that could be voted on: any robust rule clips them."""
        return self.robust != "none"

    embedding: Literal["trained", "fixed"] = "trained"
    embedding_dim: Count = 32
    hidden: Count = 150
    layers: Count = 4
    initialisation: Literal["he", "torch"] | None = None  # of the layers below the heads. None: "torch" for adam, "he" for sgd
    server_optimiser: Literal["adam", "sgd"] = "adam"
    server_lr: Positive | None = None  # None: 1e-3 for adam, 0.01 for sgd
    server_momentum: Share = 0.9  # sgd only
    server_weight_decay: NonNegative | None = None  # None: 0 for adam, 1e-3 for sgd
    embedding_lr: Positive | None = None  # None: 0.1 for adam, as the network for sgd; beside a frozen network 0.3 and 0.01

    @property
    def embeddings(self) -> Literal["none", "trained", "fixed"]:
        return self.embedding

    @property
    def mlp_initialisation(self) -> Literal["he", "torch"]:
        """The initialisation in force. Adam's steps do not grow with the gradient, so larger features make them too large."""
        if self.initialisation is not None:
            return self.initialisation
        return "torch" if self.server_optimiser == "adam" else "he"

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        if self.server_lr is not None:
            return self.server_lr
        return 1e-3 if self.server_optimiser == "adam" else 0.01

    @property
    def z_lr(self) -> float:
        """The learning rate of embeddings beside a network that learns."""
        if self.embedding_lr is not None:
            return self.embedding_lr
        return 0.1 if self.server_optimiser == "adam" else self.lr

    @property
    def fit_lr(self) -> float:
        """The learning rate of newcomers' embeddings beside a frozen network."""
        if self.embedding_lr is not None:
            return self.embedding_lr
        return 0.3 if self.server_optimiser == "adam" else 0.01

    @property
    def weight_decay(self) -> float:
        """The weight decay in force."""
        if self.server_weight_decay is not None:
            return self.server_weight_decay
        return 0.0 if self.server_optimiser == "adam" else 1e-3


SETTINGS: PluginRegistry[type[AggregatorSettings]] = PluginRegistry(
    "aggregators",
    AggregatorSettings,
    {
        "mean": MeanSettings,
        "attention": AttentionSettings,
        "heur-amp": HeurAmpSettings,
        "amp": AmpSettings,
        "hypernetwork": HypernetworkSettings,
    },
)
