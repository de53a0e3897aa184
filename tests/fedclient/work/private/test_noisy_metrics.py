"""Noise of a device's orders and of metrics: its variance, what it follows from, how much a unit moves, and its cost."""

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attune.common.config import PrivacySettings
from attune.common.errors import LimitExceeded, SettingError
from attune.common.exchange.messages import Order
from attune.common.metrics import METRICS, reported_by
from attune.common.plan import Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.gate import PrivacyLimits
from attune.fedclient.gate import rows as decided
from attune.fedclient.options import Hooks
from attune.fedclient.work.private.lattice import DEVIATION, LatticeStream
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedclient.work.private.noisy_steps import OrderNoise
from attune.fedclient.work.private.private_learning import MOST_LOSS, PrivateLearning, check_countable, noisy_metrics
from attune.fedserver.core.planning import make_plan, resolve
from tests.simulation.test_private import RANGE, simulated

ASKED = PrivacySettings(unit="example", epsilon=4.0, orders=3)


def network(tensors: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ tensors["w"]


def data(samples: int = 50) -> Prepared:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, 4, generator=draw), torch.arange(samples) % 3
    return Prepared(x, y, x[:20], y[:20], x[:0], y[:0], None)


def metrics_of(held: Prepared, multiplier: float = 1e-9, key: int = 0, groups: torch.Tensor | None = None) -> dict[str, float]:
    noise = OrderNoise(1.0, 1.0, key.to_bytes(32, "big"), 1, groups, multiplier)
    before, after = {"w": torch.zeros(4, 3)}, {"w": torch.ones(4, 3).tril() * 9}
    return dict(noisy_metrics(noise, network, before, after, held, scored=True))


def test_without_noise_they_are_the_cut_loss_and_the_accuracies() -> None:
    held = data()
    scores = held.train_x @ (torch.ones(4, 3).tril() * 9)
    losses = torch.nn.functional.cross_entropy(scores, held.train_y, reduction="none")
    assert losses.max() > MOST_LOSS
    values = metrics_of(held)
    assert values["loss"] == pytest.approx(losses.clamp(max=MOST_LOSS).mean().item(), abs=1e-5)
    assert values["accuracy_after"] == pytest.approx((scores.argmax(1) == held.train_y)[:20].double().mean().item(), abs=1e-6)
    assert values["accuracy_before"] == pytest.approx((held.test_y == 0).double().mean().item(), abs=1e-6)


def test_a_sample_or_a_whole_group_moves_each_sum_by_at_most_one() -> None:
    held, groups = data(), torch.arange(50) // 10
    for units, count, last in ((None, 50, 1), (groups, 5, 10)):
        whole = metrics_of(held, groups=units)["loss"] * count
        held.train_x[-last:] *= 1000
        moved = metrics_of(held, groups=units)["loss"] * count
        assert 0 < abs(moved - whole) <= MOST_LOSS


def test_the_noise_has_the_deviation_that_is_charged() -> None:
    held = data()
    truth = metrics_of(held)
    drawn = torch.tensor([[metrics_of(held, 2.0, key)[name] - truth[name] for name in truth] for key in range(1, 400)])
    wanted = math.sqrt(3) * 2.0 / torch.tensor([50 / MOST_LOSS, 20, 20])
    assert torch.allclose(drawn.std(dim=0), wanted, rtol=0.2)  # values below 0 are cut, so a little less
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.2
    assert metrics_of(held, 2.0, 7) == metrics_of(held, 2.0, 7)


def test_the_ledger_pays_for_them_out_of_the_same_budget(tmp_path: Path) -> None:
    plain, noisy = (
        PrivacyLedger.of_data(tmp_path / str(say), tmp_path, "d").begin("f/", ASKED, 0.1, 20, say) for say in (False, True)
    )
    assert noisy.noise > plain.noise and plain.metrics == 0
    assert 0.39 < epsilon_of([NoisySteps(1.0, noisy.metrics, 3)], 1e-5) <= 0.4
    assert 3.9 < epsilon_of(noisy.spent(3), 1e-5) <= 4 < epsilon_of(noisy.spent(4), 1e-5)
    kept = PrivacyLedger.of_data(tmp_path / "True", tmp_path, "d")
    kept.charge(noisy, "order", "a")
    assert kept.epsilon(1e-5) == epsilon_of(noisy.spent(1), 1e-5) > epsilon_of([noisy.spent(1)[0]], 1e-5)
    changed = kept.begin("f/", ASKED, 0.1, 20)  # the owner turns them off: what was spent stays, and the rest is for the others
    assert changed.orders == 2 and kept.planned(changed) <= 4
    with pytest.raises(SettingError, match="finite epsilon"):
        kept.begin("g/", PrivacySettings(unit="example", noise=0.01, orders=3), 0.1, 20, metrics=True)


def test_they_are_refused_where_nothing_is_counted_or_charged() -> None:
    with pytest.raises(SettingError, match="the task regression: say --metrics none"):
        check_countable("regression", Hooks())
    with pytest.raises(SettingError, match="a score of the user's own"):
        check_countable("classes", Hooks(None, lambda predict, some: np.zeros(1)))


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_server_is_told_those_of_training_and_nothing_else(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows = importlib.import_module("attune.simulation.simulate"), {}
    for said in ("none", "noisy", "all"):
        limits = PrivacyLimits(metrics=said)
        monkeypatch.setattr(module, "PrivacyLimits", lambda *_, limits=limits, **__: limits)
        rows[said] = simulated(method, {**RANGE, "epsilon": 8.0})._outcome.snapshot.rows
    names = {name for name in METRICS if decided()[f"Metrics.{name}"].noise != "sent"}
    shown = {said: {(row.work, name) for row in of for name in names & set(reported_by(row))} for said, of in rows.items()}
    assert shown["none"] == set()
    assert shown["noisy"] == {("train", name) for name in ("loss", "accuracy_before", "accuracy_after")} < shown["all"]
    for one, other in zip(rows["noisy"], rows["all"], strict=True):
        assert one.work == "evaluate" or (one.loss, one.accuracy_after) != (other.loss, other.accuracy_after)
    noisy, none = (max(row.epsilon or 0.0 for row in rows[said]) for said in ("noisy", "none"))
    assert 7.9 < noisy <= 8 and 7.9 < none <= 8


def test_a_plan_without_noise_is_refused() -> None:
    profile = Profile("tabular", (6,), [0, 1], 60, 20)
    plan = make_plan(resolve({"method": {"name": "fedavg"}}), {"a": profile}, "f")
    with pytest.raises(LimitExceeded, match="say --metrics none, or all"):
        PrivacyLimits(metrics="noisy").check_plan(plan, 60)


COUNT, SAMPLES = 100_000, 60
APART = 5 / math.sqrt(COUNT)  # correlation that independent numbers hardly ever have
SETTINGS = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}, "privacy": {"unit": "example", "noise": 2.0}}
VALUE = {"w": torch.zeros(3)}


def noise_of(
    root: Path,
    device: str = "a",
    order: str = "train-1-a",
    round_: int = 1,
    value: float = 0.0,
    run: str = "",
    data: str = "",
    metrics: bool = False,
) -> OrderNoise:
    """Return the noise of an order, by a device that has just started. `data`: the device whose data it has, too."""
    plan = make_plan(resolve(SETTINGS), {device: Profile("tabular", (6,), [0, 1], SAMPLES, 20)}, "f", run)
    ledger = PrivacyLedger.of_data(root / "privacy", root / device, f"sha256:{data or device}", False)
    learning = PrivateLearning(plan, ledger, SAMPLES, None, metrics=metrics, name=device)
    served = {"w": VALUE["w"] + value}
    return learning.order_noise(Order(id=order, round=round_, work="train"), served, served, 0)


def drawn(noise: OrderNoise, count: int = COUNT) -> npt.NDArray[np.float64]:
    """Return the noise of an order's steps, in deviations."""
    return LatticeStream(noise.stream("noise")).numbers(count).numpy() / DEVIATION


def test_noise_is_independent_between_rounds_devices_attempts_and_runs(tmp_path: Path) -> None:
    orders = {
        "the order": noise_of(tmp_path),
        "the next round": noise_of(tmp_path, order="train-2-a", round_=2),
        "another device": noise_of(tmp_path, device="b", order="train-1-b"),
        "another device, the same order": noise_of(tmp_path, device="c"),
        "another attempt at the order": noise_of(tmp_path, order="train-1-a.2"),
        "the same order from another value": noise_of(tmp_path, value=1e-6),
        "another run": noise_of(tmp_path, run="second"),
        "the same order in another round": noise_of(tmp_path, round_=2),  # of another learning rate, and other dropout
        "a device with the same data": noise_of(tmp_path, device="d", data="a"),
        "other noise, as metrics take their share": noise_of(tmp_path, metrics=True),
    }
    numbers = {name: drawn(noise) for name, noise in orders.items()}
    for z in numbers.values():
        assert z.var() == pytest.approx(1, abs=5 * math.sqrt(2 / COUNT))
        assert abs(z.mean()) < APART
    for one, other in itertools.combinations(numbers, 2):
        assert abs(np.corrcoef(numbers[one], numbers[other])[0, 1]) < APART, (one, other)


def test_draws_of_batches_are_independent_of_one_another_and_of_the_noise(tmp_path: Path) -> None:
    orders = (noise_of(tmp_path), noise_of(tmp_path, order="train-2-a", round_=2), noise_of(tmp_path, device="b"))
    there = []
    for noise in orders:
        steps = noise.charged
        mask = torch.zeros(steps, SAMPLES, dtype=torch.float64)
        for step, index_B in enumerate(noise.batches(SAMPLES, 30, steps, "")):
            mask[step, index_B] = 1
        there += [mask.flatten().numpy(), drawn(noise, mask.numel())]
    for one, other in itertools.combinations(there, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(len(one))


def test_a_device_that_starts_again_repeats_noise_and_batches_of_the_same_inputs(tmp_path: Path) -> None:
    first, again = noise_of(tmp_path), noise_of(tmp_path)
    assert np.array_equal(drawn(first), drawn(again))
    batches = [[index_B.tolist() for index_B in noise.batches(SAMPLES, 30, 5, "")] for noise in (first, again)]
    assert batches[0] == batches[1]
