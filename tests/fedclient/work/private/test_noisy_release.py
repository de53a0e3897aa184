"""Noisy statistics of a device: their noise, what the ledger is charged for them, and what they leave to training."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import SettingError, UpdateRefused
from attune.common.methods.private_training import check_private
from attune.common.methods.registry import configured_from
from attune.common.plan import ModelSpec, Plan
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for
from attune.common.site_statistics import NoisyColumn, NoisyLayout, NoisySums
from attune.fedclient.address import ServerAddress
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import unit_sums
from attune.fedclient.gate import PrivacyLimits
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.private.ledger import BudgetSpent, PrivacyLedger
from attune.fedclient.work.private.private_learning import check_allowed, released
from tests.empirical_epsilon import Scores, lower_bound

DELTA = 1e-5
COLUMNS = {"column 1": NoisyColumn((0.0, 50.0)), "column 2": NoisyColumn((0.0, 50.0))}
LAYOUT = NoisyLayout("fed", "example", 1.0, DELTA, 4.0, COLUMNS, ["0", "1"])
X, Y = np.arange(48.0, dtype=np.float32).reshape(24, 2), np.arange(24) % 2


def shard(more: float = 0.0) -> Shard:
    return shard_of("kiel", (X + more, Y)).load()


def ledger(folder: Path) -> PrivacyLedger:
    """Return the ledger of these data as a process finds it that starts now."""
    return PrivacyLedger.of_data(folder / "privacy", folder / "shard", "sha256:1")


def answer(folder: Path, layout: NoisyLayout = LAYOUT, data: Shard | None = None, most: float | None = 4.0) -> NoisySums:
    return released(data or shard(), layout, ledger(folder), most)


def test_a_repeated_question_costs_nothing_and_gets_the_same_bits(tmp_path: Path) -> None:
    first = answer(tmp_path)
    spent = ledger(tmp_path).epsilon(DELTA)
    assert 0.99 < spent <= 1
    assert answer(tmp_path) == first and ledger(tmp_path).epsilon(DELTA) == spent


@pytest.mark.parametrize("changed", ["layout", "data", "device"])
def test_whatever_differs_gets_noise_of_its_own_and_is_charged(changed: str, tmp_path: Path) -> None:
    """Two answers with the same noise would show in their difference what has changed, or the noise itself."""
    first = answer(tmp_path)
    if changed == "layout":
        second = answer(tmp_path, msgspec.structs.replace(LAYOUT, budget=None))
    elif changed == "data":
        second = answer(tmp_path, data=shard(0.5))
    else:
        second = answer(tmp_path / "other")
    apart = np.subtract(first.values, second.values) / first.deviation
    assert np.abs(apart).min() > 1e-5 and 0.6 < apart.std() < 3.5  # of 48 numbers with the deviation sqrt(2)
    cost = ledger(tmp_path).epsilon(DELTA)
    multiplier = noise_for(1.0, DELTA, 1.0, 1)
    assert cost == epsilon_of([NoisySteps(1.0, multiplier, 1 if changed == "device" else 2)], DELTA)


def test_the_noise_has_the_stated_deviation_around_the_sums() -> None:
    """100 devices with the same data: 4,800 numbers, whose deviation is within four standard errors, 1/sqrt(2 n) each."""
    sums = unit_sums(shard(), LAYOUT)[1]
    answers = [released(shard(), LAYOUT, PrivacyLedger.in_memory(bytes([at]) * 32), None) for at in range(100)]
    deviation = answers[0].deviation
    multiplier = noise_for(1.0, DELTA, 1.0, 1)
    assert multiplier * LAYOUT.norm <= deviation <= 1.001 * multiplier * LAYOUT.norm
    noise = np.array([one.values for one in answers]) - sums
    assert noise.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)
    assert np.abs(np.corrcoef(noise.T) - np.eye(LAYOUT.size)).max() < 0.5  # 100 draws: five standard errors


def test_an_attacker_proves_less_than_is_charged_and_not_nothing() -> None:
    """The attacker looks along the longest vector of a sample. With a sixth of the noise it would prove more than 2."""
    layout = msgspec.structs.replace(LAYOUT, epsilon=2.0, budget=None)
    x = np.concatenate([X, [[50.0, 0.0]]]).astype(np.float32)
    sites = {
        is_there: shard_of("kiel", (x[: 24 + is_there], np.arange(24 + is_there) % 2)).load() for is_there in (True, False)
    }
    true = {is_there: unit_sums(site, layout)[1] for is_there, site in sites.items()}
    vector = true[True] - true[False]
    assert np.linalg.norm(vector) == pytest.approx(layout.norm)

    def scores(is_there: bool) -> Scores:
        secrets = (bytes([is_there]) * 28 + trial.to_bytes(4, "big") for trial in range(1200))
        answers = (released(sites[is_there], layout, PrivacyLedger.in_memory(secret), None) for secret in secrets)
        return np.array([(np.array(one.values) - true[False]) @ vector for one in answers]) / layout.norm**2

    inside, outside = scores(True), scores(False)
    assert inside.mean() - outside.mean() == pytest.approx(1, abs=0.3)
    assert 0.1 < lower_bound(inside, outside, DELTA) <= 2 < lower_bound(1 + (inside - 1) / 6, outside / 6, DELTA)


def test_a_spent_budget_pays_for_no_statistics(tmp_path: Path) -> None:
    asked = PrivacySettings(unit="example", epsilon=2.0, orders=2)
    kept = ledger(tmp_path)
    run = kept.begin("fed/", asked, 0.1, 20)
    with pytest.raises(BudgetSpent, match="planned for training"):  # the noise is set so that its orders spend everything
        released(shard(), LAYOUT, kept, 2.0, "fed/")
    for number in range(2):
        kept.charge(run, f"order{number}", "a")
    with pytest.raises(BudgetSpent, match="its privacy budget is spent"):
        answer(tmp_path, most=2.0)
    assert len(ledger(tmp_path)._content.runs) == 1  # nothing was charged
    assert answer(tmp_path, most=4.0).units == 24  # without the run of that plan


@pytest.mark.parametrize("first", ["statistics", "training"])
def test_training_leaves_the_share_of_the_statistics(first: str, tmp_path: Path) -> None:
    """Whichever comes first, all orders and the statistics fit into the budget, and together spend it."""
    asked = PrivacySettings(unit="example", epsilon=2.0, orders=2, statistics_epsilon=1.0)
    kept = ledger(tmp_path)
    if first == "statistics":
        released(shard(), LAYOUT, kept, 2.0)
    run = kept.begin("fed/", asked, 0.1, 20)
    alone = ledger(tmp_path / "alone").begin("fed/", msgspec.structs.replace(asked, statistics_epsilon=None), 0.1, 20)
    assert run.noise > alone.noise and run.orders == 2
    kept.charge(run, "order0", "a")
    if first == "training":
        released(shard(), LAYOUT, kept, 2.0, "fed/")
    kept.charge(run, "order1", "a")
    assert 1.97 < ledger(tmp_path).epsilon(DELTA) <= 2
    with pytest.raises(BudgetSpent):
        answer(tmp_path, msgspec.structs.replace(LAYOUT, classes=[]), most=2.0)


def plan(**said: Any) -> Plan:
    privacy = PrivacySettings(unit="example", epsilon=4.0, delta=DELTA, **said)
    return Plan("f", 0, ModelSpec("mlr", "tabular", (2,), 2), [0, 1], "fedavg", {}, TrainSettings(), privacy=privacy)


@pytest.mark.parametrize(
    ("agreed", "limits", "why"),
    [
        (None, PrivacyLimits(delta=1e-6), "--max-delta"),
        (plan(), PrivacyLimits(), "the plan allows 0 for each example"),
        (plan(statistics_epsilon=0.5), PrivacyLimits(), "the plan allows 0.5"),
        (plan(statistics_epsilon=2.0), PrivacyLimits(), ""),
        (None, PrivacyLimits(epsilon=4.0), ""),
    ],
)
def test_a_question_above_plan_or_limits_is_refused(agreed: Plan | None, limits: PrivacyLimits, why: str) -> None:
    options = DeviceOptions(Path(), ServerAddress("localhost", 1), Path(), privacy=limits)
    if not why:
        check_allowed(LAYOUT, options, agreed, 24)
        return
    with pytest.raises(UpdateRefused, match=why):
        check_allowed(LAYOUT, options, agreed, 24)


def test_a_plan_for_groups_allows_no_question_for_samples() -> None:
    agreed = msgspec.structs.replace(plan(), privacy=PrivacySettings(unit="group", noise=1.0, statistics_epsilon=2.0))
    with pytest.raises(UpdateRefused, match="for each group"):
        check_allowed(LAYOUT, DeviceOptions(Path(), ServerAddress("localhost", 1), Path()), agreed, 24)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"unit": "client", "epsilon": 2.0, "devices": 9}, "is for noise on the devices"),
        ({"unit": "none"}, "is for noise on the devices"),
        ({"unit": "example", "epsilon": 2.0, "secure_aggregation": True}, "without privacy.secure_aggregation"),
        ({"unit": "example", "epsilon": 1.0}, "leaves nothing of privacy.epsilon = 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(said: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        check_private(configured_from({"name": "fedavg"}), TrainSettings(), PrivacySettings(statistics_epsilon=1.0, **said))
