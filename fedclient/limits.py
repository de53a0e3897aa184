"""What a device lets a server ask of it: whoever runs the server decides the plan, and the device's owner these bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attune.common.errors import LimitExceeded
from attune.common.methods.registry import configured_on_device
from attune.common.plan import Plan


@dataclass(frozen=True)
class OrderLimits:
    """The defaults are the command's. epochs: passes over the device's samples in one order. orders: in a home's whole life."""

    epochs: int = 1000
    model_bytes: int = 4 << 30
    order_s: float = 86_400.0
    orders: int = 100_000

    def check_plan(self, plan: Plan, samples: int) -> None:
        """Before anything is built from it. Errors: LimitExceeded, with the option that allows it; those of `build`."""
        from attune.common.models.size import size_bytes

        if (epochs := epochs_of(plan, samples)) > self.epochs:
            raise LimitExceeded(
                f"the server asks for {epochs:,.0f} passes over this device's samples in one order; it allows {self.epochs:,} "
                "(--max-epochs)"
            )
        # Code of the operator's own cannot be measured without its numbers; its owner has allowed it by name.
        size = 0 if ":" in plan.model.name else size_bytes(plan.model)
        if size > self.model_bytes:
            raise LimitExceeded(
                f"the server's model has {size:,} bytes; this device allows {self.model_bytes:,} (--max-model-bytes)"
            )

    def check_order(self, done: int) -> None:
        """done: orders that this home has carried out. Errors: LimitExceeded."""
        if done >= self.orders:
            raise LimitExceeded(f"this device has carried out {done:,} orders, as many as it allows (--max-orders)")


DEFAULT_LIMITS = OrderLimits()


def epochs_of(plan: Plan, samples: int) -> float:
    """Passes over so many samples that one order's training takes, with what objective and predictor add to it."""
    configured, train = configured_on_device(plan), plan.train
    batches = max(1, math.ceil(samples / train.batch_size))
    own = train.local_steps / batches if train.local_steps else train.local_epochs
    added = 0.0
    for settings in (configured.objective, configured.predictor):
        steps = getattr(settings, "tune_steps", 0)  # in place of epochs
        passes = [getattr(settings, name) for name in settings.__struct_fields__ if name.endswith("_epochs")]
        added += steps / batches if steps else sum(passes)
    return (own + added) * float(getattr(configured.objective, "inner_steps", 1))
