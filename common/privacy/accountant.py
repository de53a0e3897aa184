"""Cost of noisy sums in epsilon, the noise that keeps to an epsilon, and a run's privacy in words (status, dashboard, models).

Koskela, Jälkö, Honkela, 'Computing Tight Differential Privacy Guarantees Using FFT', AISTATS 2020; Doroshenko, Ghazi, Kamath,
Kumar, Manurangsi, 'Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions', PoPETs 2022. The package
dp-accounting computes both.

The neighbouring data sets are by default those in which the contribution of one unit (a sample, a group, a device) is replaced
by nothing ("zero-out"): the number of units is public. Amplification by sampling holds only where each unit is drawn
independently, from a source that is secret.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError

ON_SERVER = (
    "the server sees each device's update, and is trusted; other devices and the exported common model see noisy sums alone"
)
ON_DEVICES = "the server sees updates that were trained with noise; what a device keeps for itself may have none"
SUMS = "the server sees sums of at least {least} updates, and no single one"


def mode_of(privacy: PrivacySettings) -> str:
    """Return how a run protects its devices; empty if it does not."""
    modes = ["noise on the server"] * privacy.on_server + ["noise on the devices"] * privacy.on_devices
    return " and ".join(modes + ["secure aggregation"] * privacy.secure_aggregation)


def visible_of(privacy: PrivacySettings) -> str:
    """Return who sees what under `mode_of`; empty without protection."""
    words = [ON_SERVER] * privacy.on_server + [ON_DEVICES] * privacy.on_devices
    return "; ".join(words + [SUMS.format(least=privacy.secure_devices)] * privacy.secure_aggregation)


Adjacency = Literal["zero-out", "replace-one"]
MEANING: dict[Adjacency, str] = {
    "zero-out": "the contribution of one {unit} is replaced by nothing; the number of {unit}s is public",
    "replace-one": "one {unit} is replaced by another one",
}

COARSE, FINE = 1e-3, 1e-4  # grids of the privacy loss. Both give upper bounds of epsilon; the coarse one is ten times as fast.
SMALL_EPSILON = 0.5  # below it the coarse grid is too coarse
LEAST_NOISE = 0.2  # with less the grid has too many points, and epsilon is far above any that protects
MOST_NOISE = 1e6
PRECISION = 1e-3  # of a noise multiplier, relative


class NoisySteps(msgspec.Struct, frozen=True):
    """Sums that were released with noise.

    Attributes:
        rate: Chance of each unit to be in a sum, drawn independently; 1: all are in each.
        noise: Deviation of the noise in units of the clipping norm.
        steps: Number of sums.
    """

    rate: float
    noise: float
    steps: int


def epsilon_of(spent: Sequence[NoisySteps], delta: float, adjacency: Adjacency = "zero-out") -> float:
    """Return the epsilon of everything that was released, at this delta; infinite without noise.

    Raises:
        SettingError: The package dp-accounting is not installed.
    """
    steps_of: dict[tuple[float, float], int] = {}
    for one in spent:
        key = min(1.0, one.rate), one.noise
        steps_of[key] = steps_of.get(key, 0) + one.steps
    merged = tuple(sorted((rate, noise, steps) for (rate, noise), steps in steps_of.items() if steps and rate))
    if not merged:
        return 0.0
    if any(noise < LEAST_NOISE for _, noise, _ in merged):
        return math.inf
    return _epsilon(merged, delta, adjacency)


@lru_cache(maxsize=4096)  # a simulation asks the same for each of its devices
def _epsilon(merged: tuple[tuple[float, float, int], ...], delta: float, adjacency: Adjacency) -> float:
    coarse = _on_grid(merged, delta, adjacency, COARSE)
    return coarse if coarse > SMALL_EPSILON else min(coarse, _on_grid(merged, delta, adjacency, FINE))


def _on_grid(merged: tuple[tuple[float, float, int], ...], delta: float, adjacency: Adjacency, grid: float) -> float:
    dp, pld = _packages()
    relation = dp.NeighboringRelation
    accountant = pld.PLDAccountant(
        relation.ADD_OR_REMOVE_ONE if adjacency == "zero-out" else relation.REPLACE_ONE, value_discretization_interval=grid
    )
    for rate, noise, steps in merged:
        event = dp.GaussianDpEvent(noise)
        accountant.compose(dp.PoissonSampledDpEvent(rate, event) if rate < 1 else event, steps)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def noise_for(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    spent: tuple[NoisySteps, ...] = (),
    adjacency: Adjacency = "zero-out",
) -> float:
    """Return the smallest noise multiplier with which so many steps, after what was spent, keep to epsilon.

    Raises:
        SettingError: No noise is enough, because epsilon is spent already; or dp-accounting is not installed.
    """

    def cost(noise: float) -> float:
        return epsilon_of([*spent, NoisySteps(rate, noise, steps)], delta, adjacency)

    if spent and epsilon_of(spent, delta, adjacency) >= epsilon:
        raise SettingError(f"epsilon = {epsilon:g} is spent already")
    low, high = 1.0, 2.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise SettingError(f"no noise keeps {steps:,} steps to epsilon = {epsilon:g} at delta = {delta:g}")
    while low >= LEAST_NOISE and cost(low) <= epsilon:
        low, high = low / 2, low
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    return high


def _packages() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting.pld import pld_privacy_accountant
    except ImportError:
        raise SettingError(
            "differential privacy needs the package dp-accounting, which is not installed: pip install 'attune-fl[privacy]'"
        ) from None
    return dp_accounting, pld_privacy_accountant
