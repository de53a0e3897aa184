"""The settings of every aggregator by name, and what devices hand in to it; importable without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from attune.common.config import Count, NonNegative, Positive, Share
from attune.common.errors import SettingError
from attune.common.plugins import PluginRegistry

Sigma = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # finite, so that sigma * cosine is
Returns = Literal["values", "change"]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0, le=1)]
Minority = Annotated[float, msgspec.Meta(ge=0, lt=0.5)]
Robust = Literal["none", "clip", "median", "trimmed-mean", "multi-krum"]
SharedOptimiser = Literal["none", "momentum", "adam", "yogi", "adagrad"]
VOTES = ("median", "trimmed-mean", "multi-krum")  # in which devices outvote one another


class AggregatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that every aggregator has, and what is known of it without torch.

    Attributes:
        returns: Content of an update: a part's values, or their change from what was served.
        implementation: The class of an aggregator that is not built in, or "package.module:Class".
        excludes: Transforms and encodings of updates with which it cannot be combined.
    """

    returns: ClassVar[Returns] = "values"
    implementation: ClassVar[str | type] = ""
    excludes: ClassVar[frozenset[str]] = frozenset()

    # Bound on an update's change of a part, in median norms of the cohort; a larger change counts less. Needs three updates.
    # 0: no bound (docs/security.md#attackers-among-the-devices).
    bound_change: NonNegative = 3.0
    # Bound on the weight of an update, in median sample counts of the cohort. 0: no bound.
    bound_samples: NonNegative = 5.0

    @property
    def bound(self) -> float:
        """The bound on changes in force, in median norms; 0: none."""
        return self.bound_change

    @property
    def no_vote(self) -> float:
        """Above so many median norms a change does not count at all; 0: each counts."""
        return 0.0

    @property
    def amplifies(self) -> bool:
        """True if the server may take a large step for small changes, because it divides by their size or generates values."""
        return False

    @property
    def embeddings(self) -> Literal["none", "trained", "fixed"]:
        """True if the server has embeddings of clients from which their values are generated, and whether it trains them."""
        return "none"


class ChangeElsewhere(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Stand-in on a device for a plug-in aggregator of the server to which devices hand in changes."""

    returns: ClassVar[Returns] = "change"


class ClippedSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of aggregators in which a device's update can be clipped, or be outvoted: docs/security.md."""

    # Robust rule: the mean of clipped changes, the median or trimmed mean of every number, or the mean of the updates nearest
    # to others. Generated parts are clipped under every rule.
    robust: Robust = "none"
    # Largest norm of a change, in median norms of the cohort, where `method.robust` clips.
    clip: Positive = 1.0

    @property
    def clips(self) -> bool:
        return self.robust == "clip"

    @property
    def bound(self) -> float:
        return min(self.bound_change or self.clip, self.clip) if self.clips else self.bound_change

    @property
    def no_vote(self) -> float:
        """With a vote, an extreme change is dropped: scaled down to the others' size, it would look like one of them."""
        return self.bound_change if self.robust in VOTES else 0.0


class MixedSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of aggregators that mix a cohort's values by weights: docs/security.md."""

    # Largest weight of another device. What is above it goes to the device itself. 1: no cap.
    attention_cap: Cap = 1.0
    # Smallest weight of a device on itself. 0: no floor. 1: local training.
    self_floor: Fraction = 0.0


class MeanSettings(ClippedSettings, frozen=True, forbid_unknown_fields=True):
    """Weighted mean: docs/methods/fedavg.md."""

    # Share of a cohort against which trimmed-mean and multi-krum hold.
    attackers: Minority = 0.2

    # Every device of the cohort has the same weight, instead of one by its training samples.
    uniform: bool = False
    # Step of the server's value towards the cohort's mean (pFedMe's beta). 1: to the mean.
    server_mix: Positive = 1.0
    # Optimiser of the server for shared parts: each round is one step along the cohort's mean change. none: to the mean.
    shared_optimiser: SharedOptimiser = "none"
    # Learning rate of that step. none: 1 for momentum, 0.03 for the others.
    shared_lr: Positive | None = None
    # Share of the former steps that is kept (the paper's beta1). none: 0.9, and 0 for adagrad.
    shared_momentum: Share | None = None
    # Share of the former squares that is kept (the paper's beta2), for adam and yogi.
    shared_beta2: Share = 0.99
    # Smallest size of a step's denominator (the paper's tau), for adam, yogi and adagrad.
    shared_adaptivity: Positive = 1e-3

    def __post_init__(self) -> None:
        if self.shared_optimiser != "none" and self.server_mix != 1:
            raise SettingError(
                f"method.server_mix = {self.server_mix} and method.shared_optimiser = {self.shared_optimiser!r} both set the "
                "server's step: leave one of them out (method.shared_lr scales the step of an optimiser)"
            )

    @property
    def amplifies(self) -> bool:
        return self.shared_optimiser not in ("none", "momentum")

    @property
    def step(self) -> float:
        """The learning rate in force of the server's optimiser."""
        if self.shared_lr is not None:
            return self.shared_lr
        return 1.0 if self.shared_optimiser == "momentum" else 0.03

    @property
    def momentum(self) -> float:
        """The momentum in force of the server's optimiser."""
        if self.shared_momentum is not None:
            return self.shared_momentum
        return 0.0 if self.shared_optimiser == "adagrad" else 0.9


class AttentionSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """MCSA: docs/methods/fedmcsa.md. sigma = 0 is the mean; sigma -> infinity leaves each client its own value."""

    # Preference of similar devices for each other. 0: the plain mean. Very large: each device keeps its own value.
    sigma: Sigma = 50.0
    # Unit of comparison: the tensors of a layer together, or each tensor by itself (as the published code, E4).
    components: Literal["layer", "tensor"] = "layer"
    # samples: attention times the share of the data, normalised again (as the published code, E4).
    weighting: Literal["none", "samples"] = "none"
    # Weight of a device on its own value, the same in every component; the rest goes to the others by attention (the paper's
    # section 4.2). none: by attention too.
    self_weight: Fraction | None = None
    # printed: equation 7 as the paper prints it, in which the weights of a device do not sum to one (erratum E1).
    equation7: Literal["corrected", "printed"] = "corrected"
    # In evaluations each device chooses, by component, among the mean, its attended value and its own, by held-out samples
    # (docs/methods/fedmcsa.md#the-dial).
    dial: bool = False

    def __post_init__(self) -> None:
        if self.self_weight is not None and self.weighting == "samples":
            raise SettingError("method.self_weight and method.weighting both set the weights: leave one of them out")
        limited = self.self_weight is not None or self.attention_cap < 1 or self.self_floor > 0
        if self.equation7 == "printed" and (limited or self.weighting == "samples"):
            raise SettingError(
                'method.equation7 = "printed" has weights that do not sum to one: leave method.self_weight, method.weighting, '
                "method.attention_cap and method.self_floor out"
            )


class HeurAmpSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """HeurFedAMP: docs/methods/heurfedamp.md."""

    # Weight of a device's own model. 1: local training. 1 / (M + 1) suits M other devices of the same distribution.
    self_weight: Fraction = 0.25
    # Preference of similar devices for each other. 0: all other devices have the same weight.
    sigma: Sigma = 50.0


class AmpSettings(MixedSettings, frozen=True, forbid_unknown_fields=True):
    """FedAMP: docs/methods/fedamp.md."""

    # Scale of the squared distance between models. auto: the median of the cohort's pairs.
    sigma: Positive | Literal["auto"] = "auto"
    # Step of the server, alpha * S / sigma in the letters of the paper. 0: local training.
    step: Fraction = 1.0


class HandedInSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Each client's value as it was handed in, for `fedserver evaluate --matrix`."""

    # Must be 0: a bounded value would be another one.
    bound_change: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0


class HypernetworkSettings(ClippedSettings, frozen=True, forbid_unknown_fields=True):
    """FedTP's hypernetwork and its optimiser on the server: docs/methods/fedtp.md."""

    returns: ClassVar[Returns] = "change"

    @property
    def clips(self) -> bool:
        """Changes of generated weights have no coordinates that could be voted on: any robust rule clips them."""
        return self.robust != "none"

    @property
    def amplifies(self) -> bool:
        return True

    # Embeddings: trained on the server, or fixed as drawn. described: trained; a later device's fits its data at the start.
    # device: each device keeps its own (docs/methods/fedtp.md).
    embedding: Literal["trained", "fixed", "described", "device"] = "trained"
    # Largest network that is sent to devices, in bytes, with `method.embedding = "device"`. It travels both ways in each round.
    device_bytes: Count = 256 << 20
    # Size of an embedding.
    embedding_dim: Count = 32
    # Width of the hidden layers.
    hidden: Count = 150
    # Number of hidden layers.
    layers: Count = 4
    # Start of the hidden layers: he keeps the scale of an embedding through ReLUs, torch is torch's Linear, as the published
    # code. none: torch for adam, he for sgd.
    initialisation: Literal["he", "torch"] | None = None
    # Optimiser of the server's one step in each round.
    server_optimiser: Literal["adam", "sgd"] = "adam"
    # Learning rate of the server. none: 0.001 for adam, 0.01 for sgd.
    server_lr: Positive | None = None
    # Momentum for sgd. 0: plain SGD, without memory for it.
    server_momentum: Share = 0.9
    # Weight decay of the server. none: 0 for adam, 0.001 for sgd.
    server_weight_decay: NonNegative | None = None
    # printed: the sign of Delta as FedTP's equations 7 to 10 print it, with which the server climbs the loss (erratum E2).
    delta_sign: Literal["corrected", "printed"] = "corrected"
    # Learning rate of the embeddings. none: 0.1 for adam, as the network for sgd; for newcomers beside a frozen network 0.3
    # and 0.01.
    embedding_lr: Positive | None = None

    def __post_init__(self) -> None:
        if self.delta_sign == "printed" and self.on_device:
            raise SettingError(
                'method.delta_sign = "printed" is for embeddings on the server: leave method.embedding = "device" out'
            )

    @property
    def embeddings(self) -> Literal["none", "trained", "fixed"]:
        if self.on_device:
            return "none"
        return "fixed" if self.embedding == "fixed" else "trained"

    @property
    def is_described(self) -> bool:
        """True if devices are asked for a description of their data."""
        return self.embedding == "described"

    @property
    def on_device(self) -> bool:
        """True if each device keeps its embedding, and generates its values itself."""
        return self.embedding == "device"

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


class ClosedFormSettings(AggregatorSettings, frozen=True, forbid_unknown_fields=True):
    """Closed form: docs/methods/analytic.md. Sums have no direction to bound. The samples behind them are bounded."""

    excludes: ClassVar[frozenset[str]] = frozenset({"bf16", "int8", "norm-limit", "change-bound"})

    # Must be 0: the server checks sums instead.
    bound_change: NonNegative = 0.0


SETTINGS: PluginRegistry[type[AggregatorSettings]] = PluginRegistry(
    "aggregators",
    AggregatorSettings,
    {
        "mean": MeanSettings,
        "attention": AttentionSettings,
        "heur-amp": HeurAmpSettings,
        "amp": AmpSettings,
        "handed-in": HandedInSettings,
        "closed-form": ClosedFormSettings,
        "hypernetwork": HypernetworkSettings,
    },
)
