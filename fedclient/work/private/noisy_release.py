"""Statistics of a device's data with noise, charged to the ledger of its data before they leave.

The device adds Gaussian noise to the sums of `fedclient.data.noisy_sums`. Sums and noise are whole numbers on a lattice, whose
rounding is part of the sensitivity. The noise comes from the ledger's secret, the layout and the sums: a repeated question gets
the same bits and costs nothing, and another layout or other sums get noise of their own.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from attune.common import homes
from attune.common.errors import UpdateRefused
from attune.common.plan import Plan
from attune.common.privacy.accountant import noise_for
from attune.common.privacy.noise import NoiseStream
from attune.common.privacy.noisy_statistics import NoisyLayout, NoisySums
from attune.fedclient.data.noisy_sums import unit_sums
from attune.fedclient.data.shard import Shard
from attune.fedclient.work.private.lattice import DEVIATION, LatticeStream, lattice_step
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.private_learning import FOLDER

if TYPE_CHECKING:
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
