"""Training orders with noise on one device: what it spends of its budget, by the plan and by its owner's limits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from attune import DISTRIBUTION
from attune.common import homes
from attune.common.errors import LimitExceeded, SettingError
from attune.common.methods.private_training import check_private, steps_per_order
from attune.common.methods.registry import configured_on_device
from attune.common.plan import Plan
from attune.common.privacy.noise import SECRET_BYTES, key_of
from attune.common.seeds import derive
from attune.common.wire.digest import digest_of
from attune.common.wire.files import digest_of_tensors
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.descent import TrainingDiverged
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.noisy_metrics import check_countable
from attune.fedclient.work.private.order_noise import OrderNoise, rate_of

if TYPE_CHECKING:
    from attune.common.exchange.messages import Order
    from attune.fedclient.options import DeviceOptions

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

    def __repr__(self) -> str:
        return f"<PrivateLearning, noise {self.run.noise:.3g}, {len(self.run.attempts)} of {self.run.orders} orders>"

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
    try:
        return (yield from work)
    except TrainingDiverged:
        if private is None:
            raise
        return otherwise


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to(torch.device("cpu")).contiguous() for name, tensor in sorted(tensors.items())}
