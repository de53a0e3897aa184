"""The ledger of what was spent: charged before training, bound to the data, and never cheaper than what was released."""

import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import HomeMismatch
from attune.common.exchange.messages import Order
from attune.common.plan import Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.fedclient.work.private import ledger as module
from attune.fedclient.work.private.ledger import BudgetSpent, PrivacyLedger, RunCharges
from attune.fedclient.work.private.private_learning import PrivateLearning
from attune.fedserver.core.planning import make_plan, resolve

PROFILE = Profile("tabular", (6,), [0, 1], 60, 20)
ASKED = PrivacySettings(unit="example", epsilon=4.0, orders=3)


def ledger(tmp_path: Path, path: str = "shard", digest: str = "sha256:1", is_new: bool = False) -> PrivacyLedger:
    return PrivacyLedger.of_data(tmp_path / "privacy", tmp_path / path, digest, is_new)


def begun(kept: PrivacyLedger, run: str = "f/", asked: PrivacySettings = ASKED) -> RunCharges:
    return kept.begin(run, asked, 0.1, 20)


def test_the_noise_is_set_for_all_orders_and_then_the_budget_is_spent(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    run = begun(kept)
    assert (run.orders, kept.epsilon(1e-5)) == (3, 0)
    assert 3.98 < kept.planned(run) <= 4
    for number in range(3):
        kept.charge(run, f"order{number}", "a")
        assert kept.epsilon(1e-5) == epsilon_of([NoisySteps(0.1, run.noise, 20 * (number + 1))], 1e-5)
    with pytest.raises(BudgetSpent, match="its privacy budget is spent"):
        kept.charge(run, "order3", "a")
    assert 3.98 < kept.epsilon(1e-5) <= 4


def test_the_same_order_repeats_its_noise_for_nothing_and_another_is_charged(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    run = begun(kept)
    first = kept.charge(run, "order", "a")
    again = ledger(tmp_path)
    assert begun(again).attempts == begun(kept).attempts and len(begun(again).attempts) == 1
    assert again.charge(begun(again), "order", "a") == first
    assert len(begun(ledger(tmp_path)).attempts) == 1
    others = [again.charge(begun(again), "order", "b"), again.charge(begun(again), "next", "a")]
    assert len({first, *others}) == 3
    assert len(begun(ledger(tmp_path)).attempts) == 3
    assert PrivacyLedger.in_memory(b"x" * 32).begin("f/", ASKED, 0.1, 20).attempts == []


def test_a_clock_that_goes_back_gives_no_budget_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock back by a year before each order, with a new process each time: orders and their noise are the same."""

    def spend(folder: Path, step_s: float) -> tuple[list[bytes], float]:
        now_s, keys = 1.8e9, []
        for number in range(3):
            now_s -= step_s
            for name in ("time", "monotonic"):
                monkeypatch.setattr(time, name, lambda now_s=now_s: now_s)
            kept = PrivacyLedger.of_data(folder, tmp_path / "shard", "sha256:1", False)
            keys.append(kept.charge(begun(kept), f"order{number}", "a"))
        with pytest.raises(BudgetSpent):
            kept.charge(begun(kept), "order3", "a")
        return keys, kept.epsilon(1e-5)

    ledger(tmp_path)
    shutil.copytree(tmp_path / "privacy", tmp_path / "other")
    keys, epsilon = spend(tmp_path / "privacy", 365 * 86400.0)
    assert (keys, epsilon) == spend(tmp_path / "other", -60.0)
    assert len(set(keys)) == 3 and 3.98 < epsilon <= 4


@pytest.mark.parametrize("changed", ["plan", "data", "groups"])
def test_an_order_that_starts_again_on_other_data_or_settings_has_other_noise(changed: str, tmp_path: Path) -> None:
    """Two updates with the same noise would show in their difference what differs between the data, or the noise itself."""
    plan = make_plan(resolve({"privacy": {"unit": "group", "noise": 2.0}}), {"a": PROFILE}, "f")
    groups, order = torch.arange(60) // 2, Order("train-1-a", 1, "train")
    kept = ledger(tmp_path)
    keys = []
    for is_changed in (False, True, False):
        now = is_changed and changed
        asked = msgspec.structs.replace(plan, train=TrainSettings(lr=0.5)) if now == "plan" else plan
        numbers = groups.flip(0) if now == "groups" else groups
        learning = PrivateLearning(asked, kept, 60, numbers, "sha256:2" if now == "data" else "sha256:1")
        keys.append(learning.order_noise(order, {}, {}, 0).key)
    assert keys[0] == keys[2] != keys[1]
    assert len(begun(ledger(tmp_path)).attempts) == 0 and len(learning.run.attempts) == 2


def test_another_device_has_other_noise_for_the_same_order(tmp_path: Path) -> None:
    one, other = ledger(tmp_path), ledger(tmp_path, "other", "sha256:2")
    assert one.charge(begun(one), "order", "a") != other.charge(begun(other), "order", "a")


@pytest.mark.parametrize(
    ("path", "digest", "is_new", "inherits"),
    [
        ("shard", "sha256:1", False, True),  # another home, the same data
        ("moved", "sha256:1", False, True),  # the same bytes at another place
        ("moved", "sha256:1", True, True),  # the same bytes are not new, whatever is said
        ("shard", "sha256:2", False, True),  # the data have changed
        ("shard", "sha256:2", True, False),  # the owner says that they are new
        ("other", "sha256:2", False, False),
    ],
)
def test_data_carry_what_was_spent_on_them(path: str, digest: str, is_new: bool, inherits: bool, tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.charge(begun(kept), "order", "a")
    spent = kept.epsilon(1e-5)
    assert spent > 0
    assert ledger(tmp_path, path, digest, is_new).epsilon(1e-5) == (spent if inherits else 0)


def test_new_data_leave_the_old_ones_their_charges(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.charge(begun(kept), "order", "a")
    ledger(tmp_path, digest="sha256:2", is_new=True)
    assert ledger(tmp_path, digest="sha256:2").epsilon(1e-5) == 0
    assert ledger(tmp_path, "back", "sha256:1").epsilon(1e-5) == kept.epsilon(1e-5)


def test_a_home_that_has_trained_more_than_the_ledger_knows_is_refused(tmp_path: Path) -> None:
    """An older copy of the ledger, or one that was left behind, would understate what was spent."""
    kept = ledger(tmp_path)
    run = begun(kept)
    for number in range(2):
        kept.charge(run, f"order{number}", "a")
    kept.check_home(run, 2)
    kept.check_home(run, 1)  # killed between the charge and the commit
    with pytest.raises(HomeMismatch, match="has 2 orders of this run, and this device has trained 3"):
        kept.check_home(run, 3)
    elsewhere = ledger(tmp_path / "other machine")
    with pytest.raises(HomeMismatch, match="has 0 orders of this run, and this device has trained 2"):
        elsewhere.check_home(begun(elsewhere), 2)
    for place, digest in (("third machine", "sha256:1"), ("", "sha256:2")):  # the owner says that the data are of other people
        new = ledger(tmp_path / place, digest=digest, is_new=True)
        new.check_home(begun(new), 2)
        again = ledger(tmp_path / place, digest=digest)
        again.check_home(begun(again), 2)
    memory = PrivacyLedger.in_memory(b"x" * 32)
    memory.check_home(begun(memory), 2)  # of a simulation, which ends with its process


def test_a_second_run_gets_what_the_first_has_left(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    first = begun(kept)
    kept.charge(first, "order", "a")
    second = begun(kept, "f/second")
    assert second.noise > first.noise
    assert 3.9 < epsilon_of([*first.spent(1), *second.spent(3)], 1e-5) <= 4
    for number in range(3):
        kept.charge(second, f"order{number}", "a")
    assert begun(kept, "f/third").orders == 0
    with pytest.raises(BudgetSpent):
        kept.charge(begun(kept, "f/third"), "order", "a")


def test_a_noise_that_is_set_ends_where_epsilon_does(tmp_path: Path) -> None:
    asked = PrivacySettings(unit="example", epsilon=4.0, noise=1.5, orders=100)
    run = begun(ledger(tmp_path), asked=asked)
    assert 1 < run.orders < 100 and run.noise == 1.5
    assert epsilon_of(run.spent(run.orders), 1e-5) <= 4 < epsilon_of(run.spent(run.orders + 1), 1e-5)


def test_other_steps_of_one_run_share_its_orders(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.charge(begun(kept), "order", "a")
    changed = kept.begin("f/", ASKED, 0.2, 10)
    assert changed.orders == 2
    assert kept.planned(changed) <= 4


def test_a_damaged_ledger_is_not_replaced(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    kept.charge(begun(kept), "order", "a")
    [file] = (tmp_path / "privacy").glob("*/ledger.json")
    assert file.stat().st_mode & 0o077 == 0
    assert len(msgspec.json.decode(file.read_bytes())["secret"]) == 64
    file.write_bytes(b"{}")
    with pytest.raises(HomeMismatch, match=r"cannot be read.*Restore it from a backup"):
        ledger(tmp_path)


def test_runs_at_the_same_time_together_keep_to_the_budget(tmp_path: Path) -> None:
    kept = ledger(tmp_path)
    runs = [begun(kept, name) for name in ("f/one", "f/two")]
    started = 0
    for number in range(3):
        for run in runs:
            try:
                kept.charge(run, f"order{number}", "a")
            except BudgetSpent:
                continue
            started += 1
    assert 3 <= started < 6
    assert kept.epsilon(1e-5) <= 4


def test_a_charge_during_another_start_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second home on the same data starts; between its read and its write the first one charges an order."""
    kept, read = ledger(tmp_path), module._read
    run = begun(kept)

    def slow(path: Path) -> module.LedgerContent:
        monkeypatch.setattr(module, "_read", read)
        content = read(path)
        kept.charge(run, "order", "a")
        return content

    monkeypatch.setattr(module, "_read", slow)
    second = ledger(tmp_path)
    assert len(begun(second).attempts) == 1 and second.epsilon(1e-5) == kept.epsilon(1e-5) > 0


def test_what_another_process_has_spent_is_reported_at_once(tmp_path: Path) -> None:
    first, second = ledger(tmp_path), ledger(tmp_path)
    run = begun(first)
    begun(second, "f/second")
    first.charge(run, "order", "a")
    spent = second.epsilon(1e-5)
    assert spent == first.epsilon(1e-5) > 0
    assert second.planned(begun(second, "f/second")) > epsilon_of(begun(second, "f/second").spent(3), 1e-5)


def test_ledgers_that_become_one_count_each_order_once(tmp_path: Path) -> None:
    """Old data come back to a path after new ones, and both were trained on in the same run: the device goes on."""
    asked = msgspec.structs.replace(ASKED, orders=5)
    for digest, is_new, orders in (("sha256:1", False, ("one",)), ("sha256:2", True, ("one", "two"))):
        kept = ledger(tmp_path, digest=digest, is_new=is_new)
        for order in orders:
            kept.charge(begun(kept, asked=asked), order, digest)
    noise = begun(kept, asked=asked).noise
    for _ in range(2):
        kept = ledger(tmp_path)  # the old data
        kept.charge(begun(kept, asked=asked), "three", "sha256:1")
        assert kept.epsilon(1e-5) == epsilon_of([NoisySteps(0.1, noise, 20 * 4)], 1e-5)


def test_runs_at_the_same_time_keep_to_what_the_owner_allows(tmp_path: Path) -> None:
    """Each plan alone costs less than --max-epsilon, and sets its noise without a budget: nothing else would stop both."""
    asked = PrivacySettings(unit="example", noise=1.5, orders=3)
    kept = ledger(tmp_path)
    runs = [begun(kept, name, asked) for name in ("f/one", "f/two")]
    most = 1.1 * kept.planned(runs[0])
    with pytest.raises(BudgetSpent):
        for number in range(3):
            for run in runs:
                kept.charge(run, f"order{number}", "a", most_epsilon=most)
    assert 0 < kept.epsilon(1e-5) <= most
