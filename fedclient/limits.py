"""Limits on what a server may ask of a device, and the plans that a device accepts.

The server's operator decides the plan, and the device's owner these limits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from attune.common.errors import NEEDS_TORCH, HomeMismatch, LimitExceeded, SettingError, WireError
from attune.common.identity.names import check_name
from attune.common.methods.registry import configured_on_device, packages_on_devices
from attune.common.models.options import SHARPNESS
from attune.common.plan import ModelSpec, Plan, run_name
from attune.common.plugins import check_allowed, check_installed, check_model_allowed
from attune.common.protocol import HAS_TORCH
from attune.common.text import clean, from_json, listed
from attune.fedclient.gate import Gate

if TYPE_CHECKING:
    from attune.fedclient.options import DeviceOptions
    from attune.fedclient.store import Store


class OrderLimits(msgspec.Struct, frozen=True):
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
        # That of a closed form without torch is checked with its options.
        size = 0 if ":" in plan.model.name or not HAS_TORCH else size_bytes(plan.model)
        if size > self.model_bytes:
            raise LimitExceeded(
                f"the server's model has {size:,} bytes; this device allows {self.model_bytes:,} (--max-model-bytes)"
            )

    def check_orders(self, done: int) -> None:
        """Check that the home may carry out another order.

        Raises:
            LimitExceeded: It has carried out as many as it may.
        """
        if done >= self.orders:
            raise LimitExceeded(f"this device has carried out {done:,} orders, as many as it allows (--max-orders)")


DEFAULT_LIMITS = OrderLimits()


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


def light_plan(plan: Plan) -> Plan:
    """Return a plan as a light device follows it: by the closed form alone, on all training samples.

    Raises:
        SettingError: The plan needs more than that.
    """
    by_sums = plan.method == "analytic" and plan.model.name == "closed-form"
    reasons = {
        f"here they are {plan.model.kind}": plan.model.kind != "tabular",
        "the task is survival": plan.task == "survival",
        "its sums over samples are those of many devices alone": plan.one_sum,
        "its devices train with noise": plan.is_private,
        "it evaluates a given model": bool(plan.given),
        "it chooses among methods (--method auto)": bool(plan.train.scored_rounds),
        f"its devices transform updates by {listed(plan.device_transforms)}": bool(plan.device_transforms),
        f"it trains networks without one ({plan.no_closed_form or 'round.analytic'})": not (by_sums or plan.closed_form),
    }
    if why := next((words for words, is_so in reasons.items() if is_so), ""):
        raise SettingError(
            f"a light device takes part by the closed form of tables alone, and in this federation {clean(why, 200)}: install "
            f"torch on it ({NEEDS_TORCH}), or leave --variant light out"
        )
    spec, options = plan.model, {} if plan.task == "regression" else {"sharpness": SHARPNESS}
    model = spec if by_sums else ModelSpec("closed-form", spec.kind, spec.shape, spec.classes, options=options)
    train = msgspec.structs.replace(plan.train, validation=0.0)
    method_options = plan.method_options if by_sums else {}
    return msgspec.structs.replace(
        plan, method="analytic", method_options=method_options, model=model, variants={}, train=train
    )


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
        SettingError: The plan runs code that is not allowed or not installed here, or lacks this device's variant.
        LimitExceeded: The plan uses other columns than the owner allows.
    """
    before, plan = _plan_before(plan, store), options.plan_here(plan)
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
    Gate(options, plan).check_method(plan.method, configured_on_device(plan).objective.adds_up)
    return before


def _plan_before(plan: Plan, store: Store) -> Plan | None:
    if plan.run:
        try:
            check_name(plan.run)
        except SettingError:
            raise WireError(f"the server names a run that cannot be: {clean(plan.run)!r}") from None
    kept = store.kept("plan")
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
