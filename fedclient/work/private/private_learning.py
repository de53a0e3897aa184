"""Training orders with noise on one device, and noisy statistics of its data: what they spend of its budget, by plan and owner.

To the sums of `fedclient.data.site_sums` the device adds Gaussian noise. Sums and noise are whole numbers on a lattice, whose
rounding is part of the sensitivity. The noise comes from the ledger's secret, the layout and the sums: a repeated question gets
the same bits and costs nothing, and another layout or other sums get noise of their own.

To each of three sums of a training order's metrics, each unit, a sample or a group, adds a number from 0 to 1: its loss over
MOST_LOSS, and its right answers before and after training. So it moves the three sums by at most sqrt(3) together. Each gets
noise of sqrt(3) times the multiplier (the Gaussian mechanism). The number of units is public. Only the model that was trained
with noise is scored.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attune import DISTRIBUTION
from attune.common import homes
from attune.common.errors import LimitExceeded, SettingError, UpdateRefused
from attune.common.methods.private_training import check_private, steps_per_order
from attune.common.methods.registry import configured_on_device
from attune.common.plan import Plan
from attune.common.privacy.accountant import noise_for
from attune.common.privacy.noise import SECRET_BYTES, NoiseStream, key_of
from attune.common.seeds import derive
from attune.common.site_statistics import NoisyLayout, NoisySums
from attune.common.wire.digest import digest_of
from attune.common.wire.files import digest_of_tensors
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import unit_sums
from attune.fedclient.options import Hooks
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.descent import TrainingDiverged
from attune.fedclient.work.private.lattice import DEVIATION, LatticeStream, lattice_step
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.noisy_steps import OrderNoise, rate_of

if TYPE_CHECKING:
    from attune.common.exchange.messages import Order
    from attune.fedclient.options import DeviceOptions


def check_allowed(layout: NoisyLayout, options: DeviceOptions, plan: Plan | None, samples: int) -> None:
    """Check a question to a device with so many samples against the plan, and against the limits of the device's owner.

    Raises:
        UpdateRefused: It asks for more.
    """
    if layout.delta > (limit := options.privacy.most_delta(samples)):
        raise UpdateRefused(f"the question has delta = {layout.delta:g}; it allows {limit:.3g} (--max-delta)")
    if plan is None or plan.privacy is None or not plan.is_private:
        return
    agreed = plan.privacy
    most = agreed.statistics_epsilon or 0.0
    if layout.epsilon > most or layout.delta > agreed.delta or layout.unit != agreed.unit:
        raise UpdateRefused(
            f"the question protects each {layout.unit} with epsilon = {layout.epsilon:g}, and the plan allows {most:g} "
            f"for each {agreed.unit} (privacy.statistics_epsilon)"
        )


def released(shard: Shard, layout: NoisyLayout, ledger: PrivacyLedger, most: float | None, running: str = "") -> NoisySums:
    """Charge the ledger, and return the sums of a shard with noise.

    Args:
        shard: The data.
        layout: What is released.
        ledger: The ledger of these data.
        most: Epsilon that may be spent on them in all; None: not limited.
        running: The federation and its run whose orders to come are counted as spent.

    Raises:
        UpdateRefused: The shard cannot fill the layout.
        BudgetSpent: The budget does not allow it.
        SettingError: dp-accounting is not installed, or there are too many numbers for so small an epsilon.
    """
    layout.check()
    units, sums = unit_sums(shard, layout)
    multiplier = noise_for(layout.epsilon, layout.delta, 1.0, 1)
    step = lattice_step(layout.norm, multiplier, layout.size)
    whole = np.rint(sums / step).astype(np.int64)
    key = ledger.charge_statistics(layout, multiplier, hashlib.sha256(whole.tobytes()).hexdigest(), most, running)
    noise = LatticeStream(NoiseStream(key)).numbers(layout.size).numpy().astype(np.int64)
    return NoisySums(units, step * DEVIATION, ((whole + noise) * step).tolist())


def noisy_statistics(shard: Shard, layout: NoisyLayout, options: DeviceOptions, plan: Plan | None, digest: str) -> NoisySums:
    """Return the noisy statistics of a device's data. Errors are those of `check_allowed` and `released`.

    Args:
        shard: The data.
        layout: What is released.
        options: The owner's options.
        plan: The plan that the device has accepted.
        digest: Digest of the data.

    Raises:
        HomeMismatch: The ledger cannot be read.
    """
    check_allowed(layout, options, plan, len(shard.train_x))
    agreed = plan.privacy.epsilon if plan is not None and plan.privacy is not None and plan.is_private else None
    limits = [limit for limit in (options.privacy.epsilon, layout.budget, agreed) if limit is not None]
    ledger = PrivacyLedger.of_data(homes.root() / FOLDER, options.data, digest, options.privacy.new_data)
    running = f"{plan.federation}/{plan.run}" if plan is not None else ""
    return released(shard, layout, ledger, min(limits, default=None), running)


T = TypeVar("T")
FOLDER = "privacy"  # of all ledgers, beside the default homes


class PrivateLearning:
    """Noise of a device's orders, charged to the ledger of its data.

    Args:
        plan: A plan with `privacy.unit`.
        ledger: The ledger of the data.
        samples: Training samples.
        digest: Digest of the data.
        groups: Number of each sample's group, (N,); None: the shard has none.
        metrics: The metrics of its orders leave with noise.
        seed: Of a simulation whose rounds repeat their noise, whatever their inputs.
        name: The device, whose draws (dropout, augmentation) differ from those of another one with the same data.

    Raises:
        SettingError: This device cannot train so.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: PrivacyLedger,
        samples: int,
        groups: Tensor | None,
        digest: str = "",
        metrics: bool = False,
        seed: bytes | None = None,
        name: str = "",
    ) -> None:
        assert plan.privacy is not None  # noqa: S101 - for mypy
        configured = configured_on_device(plan)
        check_private(configured, plan.train, plan.privacy)
        if plan.privacy.unit == "group" and groups is None:
            raise SettingError(
                'this federation protects groups of samples (privacy.unit = "group"), and this device\'s data name none: say '
                "which column is the group (--group, or `groups` in train.npz)"
            )
        if not samples:
            raise SettingError("this device has no training samples: it cannot train with noise")
        self._privacy, self._ledger, self._seed = plan.privacy, ledger, seed
        self._most_epsilon: float | None = None  # of the owner
        self._groups = groups if plan.privacy.unit == "group" else None
        self._steps = steps_per_order(configured, plan.train, samples)
        rate = rate_of(samples, plan.train.batch_size)
        self.run = ledger.begin(f"{plan.federation}/{plan.run}", plan.privacy, rate, self._steps, metrics)
        # The same noise on other data or with other settings would be taken off by comparing the updates.
        numbers = {} if groups is None else {"groups": groups}
        of_plan, of_groups = digest_of(msgspec.json.encode(plan)), digest_of_tensors(numbers)
        self._inputs = [version(DISTRIBUTION), digest, of_plan, of_groups, name, f"{self.run.noise!r} {self.run.metrics!r}"]

    @property
    def planned(self) -> float:
        """Epsilon of these data after all orders of the run."""
        return self._ledger.planned(self.run)

    @property
    def spent(self) -> float:
        """Epsilon that was spent on these data so far."""
        return self._ledger.epsilon(self._privacy.delta)

    def check_limits(self, most_epsilon: float) -> None:
        """Check what the plan asks for against the owner's limit, which holds from then on whatever other runs spend.

        Raises:
            LimitExceeded: It asks for more.
        """
        self._most_epsilon = most_epsilon
        if self.run.orders and self.planned > most_epsilon * (1 + 1e-6):
            raise LimitExceeded(
                f"this federation's plan costs this device's data epsilon = {self.planned:.3g} in all; it allows "
                f"{most_epsilon:g} (--max-epsilon)"
            )

    def check_home(self, orders: int) -> None:
        """Check that the ledger knows all orders that this home has trained in the run.

        Raises:
            HomeMismatch: It does not.
        """
        self._ledger.check_home(self.run, orders)

    def order_noise(
        self, order: Order, start: Mapping[str, Tensor], received: Mapping[str, Tensor], started: int
    ) -> OrderNoise:
        """Charge an order, and return its noise.

        Raises:
            BudgetSpent: The budget does not allow another order.
        """
        tensors = [digest_of_tensors(_by_name(start)), digest_of_tensors(_by_name(received))]
        inputs = "/".join([*self._inputs, str(order.round), *sorted(order.trains), *tensors])  # the server chooses them all
        key = self._ledger.charge(self.run, order.id, inputs, started, self._most_epsilon)
        if self._seed is not None:
            key = key_of(self._seed, order.round, *sorted(order.trains))
        return OrderNoise(self._privacy.clip, self.run.noise, key, self._steps, self._groups, self.run.metrics)


def private_learning(
    plan: Plan, options: DeviceOptions, name: str, digest: str, samples: int, groups: Tensor | None
) -> PrivateLearning | None:
    """Return how this device trains with noise; None if the plan does not ask for it.

    Raises:
        LimitExceeded: The plan asks for more than the device's owner allows.
        SettingError: This device cannot train so, or not with these metrics; or the noise is from a seed that others know.
    """
    if not plan.is_private or plan.privacy is None:
        return None
    seed, noisy = plan.privacy.insecure_seed, options.privacy.metrics == "noisy"
    if noisy:
        check_countable(plan.task, options.hooks)
    if options.simulated:
        ledger = PrivacyLedger.in_memory(secrets.token_bytes(SECRET_BYTES))
    elif seed is not None:
        raise SettingError(
            "this federation's noise comes from privacy.insecure_seed, which its server and all devices know: it protects "
            "nothing. That setting is for simulations; ask the server's operator to leave it out"
        )
    else:
        ledger = PrivacyLedger.of_data(homes.root() / FOLDER, options.data, digest, options.privacy.new_data)
    repeated = None if seed is None else key_of(str(derive(seed, "privacy")).encode(), name)
    learning = PrivateLearning(plan, ledger, samples, groups, digest, noisy, repeated, name)
    if options.privacy.epsilon is not None:
        learning.check_limits(options.privacy.epsilon)
    return learning


def quietly(private: PrivateLearning | None, work: Jobs[T], otherwise: T) -> Jobs[T]:
    """Return the result of work that has no noise. If it diverges on a device that trains with noise, return `otherwise`.

    The server is told of each order that fails. So this work must not fail an order: its divergence would tell of the samples.
    """
    return work if private is None else _quiet(work, otherwise)


def _quiet(work: Jobs[T], otherwise: T) -> Jobs[T]:
    try:
        return (yield from work)
    except TrainingDiverged:
        return otherwise


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to(torch.device("cpu")).contiguous() for name, tensor in sorted(tensors.items())}


MOST_LOSS = 4.0  # nats; a larger loss counts as this one
LogitsFunction = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # (tensors, x) -> logits


def check_countable(task: str, hooks: Hooks) -> None:
    """Check that scores are counts of right answers.

    Raises:
        SettingError: They are something else.
    """
    if task != "classes" or hooks.evaluate is not None:
        what = "a score of the user's own" if hooks.evaluate is not None else f"the task {task}"
        raise SettingError(f"--metrics noisy counts right answers of classes, and this device has {what}: say --metrics none")


def noisy_metrics(
    noise: OrderNoise | None,
    network: LogitsFunction,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    data: Prepared,
    scored: bool,
) -> Mapping[str, float]:
    """Return the metrics of a training order as the server may be told them; empty if they stay on the device.

    Args:
        noise: Noise of the order.
        network: The model as a function.
        before: The tensors from which training started.
        after: The trained ones.
        data: The samples of the device.
        scored: The accuracies are wanted.
    """
    if noise is None or not noise.metrics:
        return {}
    grouped = noise.groups is not None
    values = {"loss": _unit_means(_losses(network(after, data.train_x), data.train_y) / MOST_LOSS, noise.groups)}
    if scored and len(data.test_x):
        tested = torch.as_tensor(data.test_groups) if grouped and data.test_groups is not None else None
        for name, tensors in (("accuracy_before", before), ("accuracy_after", after)):
            values[name] = _unit_means(_right(network(tensors, data.test_x), data.test_y), tested)
    deviation, stream = math.sqrt(3) * noise.metrics, noise.stream("metrics")
    drawn = {name: float(stream.normal(1)) for name in ("loss", "accuracy_before", "accuracy_after")}
    shares = {name: (float(value_U.sum()) + deviation * drawn[name]) / len(value_U) for name, value_U in values.items()}
    return {name: min(1.0, max(0.0, share)) * (MOST_LOSS if name == "loss" else 1.0) for name, share in shares.items()}


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, cut to MOST_LOSS, (N,)."""
    loss_of_label = cross_entropy(logits.cpu().flatten(end_dim=-2).double(), y.cpu().flatten(), reduction="none")
    return loss_of_label.nan_to_num(MOST_LOSS).reshape(len(y), -1).mean(dim=1).clamp(max=MOST_LOSS)


def _right(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers of each sample, (N,)."""
    return (logits.cpu().argmax(-1) == y.cpu()).double().reshape(len(y), -1).mean(dim=1)


def _unit_means(value_N: Tensor, units_N: Tensor | None) -> Tensor:
    """Return the mean of each unit, (U,); without units each sample is one."""
    if units_N is None:
        return value_N
    _, unit_N = torch.unique(units_N.cpu(), return_inverse=True)
    count_U = torch.bincount(unit_N).double()
    return torch.zeros_like(count_U).index_add_(0, unit_N, value_N) / count_U
