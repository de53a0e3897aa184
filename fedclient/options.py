"""The options of the command line, as values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from attune.common.errors import NEEDS_TORCH, SettingError
from attune.common.plan import LIGHT, MAIN, Plan, check_tag
from attune.common.protocol import HAS_TORCH
from attune.fedclient.address import CONNECT_TIMEOUT_S, ServerAddress
from attune.fedclient.gate import NO_DEMANDS, PrivacyLimits
from attune.fedclient.limits import DEFAULT_LIMITS, OrderLimits, light_plan
from attune.fedclient.messages import Event
from attune.fedclient.read_options import PLAIN, ReadOptions
from attune.fedclient.resource_limits import NO_BOUNDS, ResourceLimits

# train(model, data, context) -> the loss, {"loss": ...} or None. evaluate(model, data) -> the score of each sample, 0 to 1.
Train = Callable[[Any, Any, Any], Any]
Evaluate = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Hooks:
    """train(model, data, context) and evaluate(model, data): docs/own-training.md. None: the built-in one."""

    train: Train | None = None
    evaluate: Evaluate | None = None

    @classmethod
    def of_module(cls, name: str) -> Self:
        """Return `train` and `evaluate` of a module, or the one that it has.

        Raises:
            SettingError: The module cannot be imported, or has neither.
        """
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise SettingError(f"the module {name!r} of --hooks cannot be imported: {error}") from None
        functions = {key: getattr(module, key, None) for key in ("train", "evaluate")}
        if not any(map(callable, functions.values())):
            raise SettingError(f"the module {name!r} of --hooks has neither a function train nor a function evaluate")
        return cls(**{key: function if callable(function) else None for key, function in functions.items()})


NONE = Hooks()


def variant_here(asked: str) -> str:
    """Return the variant that an installation can have: without torch it is the light one.

    Raises:
        SettingError: It was asked for another one.
    """
    if HAS_TORCH or asked == LIGHT:
        return asked
    if asked != MAIN:
        raise SettingError(f"the variant {asked} of a model needs torch, which is not installed: {NEEDS_TORCH}")
    return LIGHT


DisclosedKind = Literal["statistics", "masked-statistics", "sums", "model"]
# Models with which a device compares what it keeps: ordinary ones that it fits alone, and a network that it trains alone.
Baseline = Literal["alone", "local", "alone+local", "none"]
DEFAULT_BASELINE: Baseline = "alone"
INSTEAD = "they know no pixels and no task of your own. The same network, trained here alone, takes their place"


SHARED = (
    "the server and each other site get this device's finished network, whose parameters can reveal samples that it was "
    "trained on (--share-model)"
)


def _has_no_ordinary_models(plan: Plan) -> bool:
    return plan.model.labels_pixels or plan.task == "custom"


@dataclass(frozen=True)
class DeviceOptions:
    """The settings of one device's run; the defaults are the command's."""

    data: Path
    server: ServerAddress
    home: Path | None = None
    name: str | None = None
    label: str | None = None  # the shard's name beside others of one process; None: it is alone
    token: str | None = None
    device: str = "auto"
    threads: int = 1
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    keep: Literal["best", "personalized"] = "best"
    baseline: Baseline | None = None  # None: DEFAULT_BASELINE
    allow_models: tuple[str, ...] = ()
    allow_plugins: tuple[str, ...] = ()  # distributions whose code the federation may run here
    disclose: tuple[DisclosedKind, ...] = ()  # what else the server may know
    authority: Path | None = None  # whose certificates others must have in secure aggregation; None: the server's
    signer: Path | None = None  # this device's key and certificate of that authority
    stay: bool = False  # after the last round, for the federation's next run
    limits: OrderLimits = DEFAULT_LIMITS
    privacy: PrivacyLimits = NO_DEMANDS
    simulated: bool = False  # nothing leaves this process, so what is spent is not kept
    resources: ResourceLimits = NO_BOUNDS  # what of the machine it may use, and when
    hooks: Hooks = NONE  # the device's own training and scores
    units: Literal["all", "none"] = "all"  # whether the server is told by a word if columns fit the schema's ranges
    rest_s: float = 0.0  # without work, after which it raises Rested; 0: never
    process: str = ""  # same as for GrpcLink
    woken_by: tuple[Event, ...] = ()  # events that come before those of the stream
    table: ReadOptions = PLAIN  # where the data are a table: which column is what
    variant: str = MAIN  # of the federation's model
    tag: str = ""  # by which the operator may limit rounds; empty: none

    def plan_here(self, plan: Plan) -> Plan:
        """Return a plan as this device follows it, with the model of its variant alone.

        Raises:
            SettingError: The plan has no such variant, or needs what a light device cannot do.
        """
        if self.variant == LIGHT:
            return light_plan(plan)
        return plan.of_variant("" if self.variant == MAIN else self.variant)

    @property
    def fits_alone(self) -> bool:
        """True if ordinary models are fitted on this device's samples alone."""
        return "alone" in (self.baseline or DEFAULT_BASELINE)

    def trains_local(self, plan: Plan) -> bool:
        """Return whether a network is trained on this device alone, beside that of the method.

        Of pixels and of a task of one's own there are no ordinary models, so this network is what the device could do alone.
        """
        return "local" in (self.baseline or DEFAULT_BASELINE) or (self.fits_alone and _has_no_ordinary_models(plan))

    def against_alone(self, plan: Plan) -> str:
        """Return why no ordinary models are fitted on this device in this federation, as a line for people; empty: they are."""
        if not self.fits_alone:
            return "no ordinary models are fitted for comparison (--baseline)"
        if not plan.portfolio:
            return "no ordinary models are fitted for comparison: the server's version does not know them"
        if _has_no_ordinary_models(plan):
            return f"no ordinary models are fitted for comparison: {INSTEAD}"
        if plan.model.per_position:
            return "no ordinary models are fitted for comparison: they know no labels for positions"
        if plan.model.kind == "tokens" and not plan.model.body_digest:
            return "no ordinary models are fitted for comparison: they need features of tokens, from a model with a frozen body"
        if self.hooks.evaluate is not None:
            return "no ordinary models are fitted for comparison: this device scores by a function of its own"
        return ""

    def shared_words(self, plan: Plan) -> str:
        """Return in one line what leaves this device for others under this plan by its owner's word; empty: nothing more."""
        return SHARED * (plan.matrix and "model" in self.disclose)

    def __post_init__(self) -> None:
        check_tag(self.tag)
        if self.table.proposes and self.privacy.needs_noise:
            raise SettingError(
                "--schema auto tells the server of single rows, and with --max-epsilon or --max-delta nothing leaves without "
                "noise: give the schema of the operator (--schema FILE)"
            )
