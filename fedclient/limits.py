"""Limits on what a server may ask of a device, and the plans that a device accepts.

The server's operator decides the plan, and the device's owner these limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from attune.common.errors import (
    AttuneError,
    Forbidden,
    HomeMismatch,
    LimitExceeded,
    NonFiniteFeatures,
    SettingError,
    ShapeMismatch,
    UndeclaredLabels,
    WireError,
)
from attune.common.exchange.messages import Order
from attune.common.exchange.registry import secure_sum_in
from attune.common.identity.names import check_name
from attune.common.methods.method import SOLVED
from attune.common.methods.registry import configured_on_device, packages_on_devices
from attune.common.plan import FEWEST_DEVICES, Plan, run_name
from attune.common.plugins import check_allowed, check_installed, check_model_allowed
from attune.common.protocol import SPENT
from attune.common.text import clean, from_json, listed

if TYPE_CHECKING:
    from attune.fedclient.options import DeviceOptions
    from attune.fedclient.store import Store


@dataclass(frozen=True)
class OrderLimits:
    """Bounds on orders and plans; the defaults are the command's.

    Attributes:
        epochs: Passes over the device's samples in one order.
        model_bytes: Size of the model.
        order_s: Seconds of one order.
        orders: Orders in a home's whole life.
        models: Names of the models that may run; empty: all.
        runs: Names of the runs that the device takes part in; empty: all.
    """

    epochs: int = 1000
    model_bytes: int = 4 << 30
    order_s: float = 86_400.0
    orders: int = 100_000
    models: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    def check_plan(self, plan: Plan, samples: int) -> None:
        """Check a plan before anything is built from it. Errors of `build` are raised too.

        Raises:
            LimitExceeded: The plan asks for too much; the message has the option that allows it.
        """
        from attune.common.models.registry import size_bytes

        if self.runs and (run := run_name(plan.run)) not in self.runs:
            raise LimitExceeded(f"this device takes no part in the run {run}, only in {', '.join(self.runs)} (--only-run)")
        if self.models and plan.model.name not in self.models:
            raise LimitExceeded(
                f"the server's model is {clean(plan.model.name)}; this device runs only {', '.join(self.models)} (--only-model)"
            )
        if (epochs := epochs_of(plan, samples)) > self.epochs:
            raise LimitExceeded(
                f"the server asks for {epochs:,.0f} passes over this device's samples in one order; it allows {self.epochs:,} "
                "(--max-epochs)"
            )
        # The size of custom model code is not known before it is built. The device's owner has allowed this code by name.
        size = 0 if ":" in plan.model.name else size_bytes(plan.model)
        if size > self.model_bytes:
            raise LimitExceeded(
                f"the server's model has {size:,} bytes; this device allows {self.model_bytes:,} (--max-model-bytes)"
            )

    def bounded(self, order: Order, done: int, say: Callable[[str], None]) -> Order:
        """Return the order within these limits: without finishing, if that takes too many passes over the samples.

        Args:
            order: The order; it may fine-tune two models at most.
            done: Orders that the home has carried out.
            say: Takes a line about what is left out.

        Raises:
            LimitExceeded: The home may not carry out another order.
        """
        if done >= self.orders:
            raise LimitExceeded(f"this device has carried out {done:,} orders, as many as it allows (--max-orders)")
        if (epochs := 2 * order.finish_epochs) <= self.epochs:
            return order
        say(
            f"models are not finished: the server asks for up to {epochs:,} passes over the samples, and this device allows "
            f"{self.epochs:,} in one order (--max-epochs)"
        )
        return replace(order, finish_epochs=0)


DEFAULT_LIMITS = OrderLimits()


@dataclass(frozen=True)
class PrivacyLimits:
    """Demands of a device's owner on the privacy of its samples.

    Attributes:
        epsilon: Most epsilon that these data may be charged in all; None: no limit, and training without noise is allowed.
        delta: Largest delta; None: no limit, but with `epsilon` 1 / samples: a larger one may show a sample as it is.
        samples: Fewest training samples with which the device takes part.
        metrics: What the server is told of losses and scores. None: all of it without noise in training, nothing with it.
            noisy: those of training, with noise that is charged.
        devices: Fewest devices of whose updates the server learns the sum alone; 0: it may read single updates.
        new_data: Data with another digest than before are of other people, so nothing was spent on them.
    """

    epsilon: float | None = None
    delta: float | None = None
    samples: int = 0
    metrics: Literal["none", "noisy", "all"] | None = None
    new_data: bool = False
    devices: int = 0

    def __post_init__(self) -> None:
        for name, bound in (("epsilon", self.epsilon), ("delta", self.delta)):
            if bound is not None and not math.isfinite(bound):  # no plan would ever be above it
                raise SettingError(f"--max-{name} is a finite number, not {bound}; without the option there is no bound")

    @property
    def needs_noise(self) -> bool:
        """True if what depends on single samples may leave the device only with noise."""
        return self.epsilon is not None or self.delta is not None

    def most_delta(self, samples: int) -> float:
        """Return the largest delta for a device with so many training samples; infinite without a limit."""
        if self.delta is not None:
            return self.delta
        return math.inf if self.epsilon is None else 1 / max(1, samples)

    def check_plan(self, plan: Plan, samples: int) -> None:
        """Check a plan before anything is trained. The privacy ledger checks what it costs.

        Raises:
            LimitExceeded: The plan asks for more; the message has the option that allows it.
        """
        if samples < self.samples:
            raise LimitExceeded(
                f"this device has {samples} training samples; it takes part from {self.samples} on (--min-samples)"
            )
        secure = secure_sum_in(plan.transforms)
        if (least := secure.devices if secure else 1) < self.devices:
            raise LimitExceeded(
                f"this federation's server reads sums of {least} updates (privacy.secure_aggregation, privacy.secure_devices); "
                f"this device hands in to sums of at least {self.devices} (--min-devices)"
            )
        asks = plan.privacy if plan.is_private else None
        if asks is None and self.metrics == "noisy":
            raise LimitExceeded(
                "this federation's devices train without noise (privacy.unit), so no budget pays for noise on "
                "their metrics; say --metrics none, or all"
            )
        if asks is None and self.needs_noise:
            raise LimitExceeded(
                "this federation's devices train without noise (privacy.unit); this device allows that only without "
                "--max-epsilon and --max-delta"
            )
        if asks is not None and self.epsilon is not None and asks.epsilon is not None and asks.epsilon > self.epsilon:
            raise LimitExceeded(
                f"this federation's plan has privacy.epsilon = {asks.epsilon:g}; this device allows {self.epsilon:g} "
                "(--max-epsilon)"
            )
        if asks is not None and asks.delta > (most := self.most_delta(samples)):
            raise LimitExceeded(
                f"this federation's plan has privacy.delta = {asks.delta:g}; this device allows {most:.3g} (--max-delta)"
            )

    def told(self, reason: str, plan: Plan | None) -> str:
        """Return what the server is told of an error: its text may tell of samples."""
        return reason if reason == SPENT or self.tells_scores(plan) else "it cannot carry out the order; its own log says why"

    def declined(self, error: AttuneError, plan: Plan) -> str:
        """Return what the server is told of why the device takes no part: not which labels, tokens or gaps its data have.

        A server could leave some of them out of a plan, to be told which ones occur and how often.
        """
        of_samples = isinstance(error, (UndeclaredLabels, ShapeMismatch, NonFiniteFeatures))
        if of_samples and (self.needs_noise or not self.tells_scores(plan)):
            return f"its data do not fit the plan ({error.kind}); its own log says why"
        return str(error)

    def tells_scores(self, plan: Plan | None) -> bool:
        """Return whether the server is told losses, scores and the texts of errors."""
        return self.metrics == "all" or (self.metrics is None and not (plan is not None and plan.is_private))


NO_DEMANDS = PrivacyLimits()


def epochs_of(plan: Plan, samples: int) -> float:
    """Return how many passes over the samples one order's training takes, with those of objective and predictor."""
    configured, train = configured_on_device(plan), plan.train
    batches = max(1, math.ceil(samples / train.batch_size))
    training_passes = train.local_steps / batches if train.local_steps else train.local_epochs
    added = 0.0
    for settings in (configured.objective, configured.predictor):
        steps = getattr(settings, "tune_steps", 0)  # in place of epochs
        passes = [getattr(settings, name) for name in settings.__struct_fields__ if name.endswith("_epochs")]
        added += steps / batches if steps else sum(passes)
    return (training_passes + added) * float(getattr(configured.objective, "inner_steps", 1))


DAMAGED = (
    "Keep this home: one of the two is damaged. Ask the server's operator to run `fedserver verify`, "
    "and run `fedclient verify` here"
)


def accept_plan(plan: Plan, store: Store, options: DeviceOptions) -> Plan | None:
    """Refuse a plan under which this device must not take part.

    Returns:
        The plan of another run of the same federation, which this one follows; None where there is none.

    Raises:
        HomeMismatch: The home is bound to another federation.
        SettingError: The plan runs code that is not allowed or not installed here.
        LimitExceeded: The plan uses other columns than the owner allows.
    """
    before = _plan_before(plan, store)
    check_model_allowed(plan.model.name, options.allow_models, "the federation's model")
    check_allowed(plan.plugins, options.allow_plugins)
    check_installed(plan.plugins)
    allowed = options.table.columns if plan.schema is None else ()  # by a schema, other columns count as missing here
    if allowed and (beyond := [name for name in plan.column_names if name not in allowed]):
        raise LimitExceeded(
            f"this federation's plan uses the columns {clean(listed(beyond))}; this device uses only {listed(allowed)} "
            "(--columns)"
        )
    # Do not trust the plan's list: a package whose code the names in the plan would load must be in it.
    for package in packages_on_devices(plan.method, plan.method_options, plan.model.name, plan.device_transforms):
        if package.name not in plan.plugins:
            raise WireError(f"the server's plan uses the plug-in {package.name}, which it does not list; update the server")
    secure = secure_sum_in(plan.transforms)
    in_sums = "sums" in options.disclose or (secure is not None and secure.exact)
    if configured_on_device(plan).objective.adds_up and not in_sums:
        raise LimitExceeded(
            f"this federation's method {plan.method} asks for sums over this device's samples, from which single samples can "
            "be computed; the owner of the data allows that by --disclose sums, or the operator masks them "
            "(privacy.secure_aggregation)"
        )
    return before


def check_sums(order: Order, options: DeviceOptions, plan: Plan | None) -> None:
    """Check that an order asks for sums over samples only where the owner allows it, or masks hide them among enough others.

    Raises:
        Forbidden: It asks for them all the same.
    """
    adds_up = SOLVED in order.returns
    secure = secure_sum_in(plan.transforms) if adds_up and plan is not None else None
    if adds_up and not ("sums" in options.disclose if secure is None else secure.devices >= FEWEST_DEVICES):
        raise Forbidden("the server asked for sums over samples; this device's owner allows none (--disclose sums)")


def _plan_before(plan: Plan, store: Store) -> Plan | None:
    if plan.run:
        try:
            check_name(plan.run)
        except SettingError:
            raise WireError(f"the server names a run that cannot be: {clean(plan.run)!r}") from None
    kept = store.plan()
    if kept is None:
        return None
    try:
        stored = from_json(kept, Plan)
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"the plan in {store.where} is damaged ({error}); restore it, or use another --home") from None
    if stored.federation != plan.federation:
        raise HomeMismatch(
            f"the server has the certificate of this device's federation, and its plan is of another federation than the one "
            f"in {store.where}. {DAMAGED}"
        )
    if stored.run != plan.run:
        return stored
    if stored != plan:
        raise HomeMismatch(f"the server's plan differs from the one this device trained under (in {store.where}). {DAMAGED}")
    return None
