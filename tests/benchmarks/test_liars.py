"""Liars hand in what the table says, by hand; the costliest lie is chosen; the server's start names what the rows show."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attune.fedserver.core.policy import COSTS
from benchmarks.liars import BACK, CLAIM, DRIFT, FLIP, JOINT, KEY, RANDOM, Lie, worst
from benchmarks.robust import Attack, Data, run
from benchmarks.robust_tables import UNLIKE, USUAL, costs, read_rows

SERVED = {"w": torch.tensor([1.0, 1.0]), "count": torch.tensor(3)}
TRAINED = {"w": torch.tensor([4.0, 5.0]), "count": torch.tensor(5)}  # a change of (3, 4), whose norm is 5


def device(name: str) -> Any:
    return SimpleNamespace(name=name)


def handed_in(lie: Lie, name: str = "eve", round_: int = 1, served: Any = SERVED, trained: Any = TRAINED) -> Any:
    return lie.values(device(name), "shared", round_, served, trained)


def lie(kind: str, size: float) -> Lie:
    return Lie(kind, frozenset({"eve", "mal"}), 4, size)


def test_a_flip_by_hand() -> None:
    found = handed_in(lie(FLIP, 2.0))
    assert found["w"].tolist() == [1.0 - 6.0, 1.0 - 8.0]
    assert found["count"] == 5, "whole numbers stay as trained"


def test_joint_liars_go_against_the_mean_of_their_changes_of_the_round_before() -> None:
    joint = lie(JOINT, 1.0)
    other = {"w": torch.tensor([6.0, 1.0]), "count": torch.tensor(5)}  # a change of (5, 0)
    assert handed_in(joint)["w"].tolist() == [1.0 - 3.0, 1.0 - 4.0], "in the first round as a flip"
    handed_in(joint, "mal", trained=other)
    mean = np.array([4.0, 2.0])  # of (3, 4) and (5, 0)
    found = [handed_in(joint, name, 2)["w"].numpy() for name in ("eve", "mal")]
    np.testing.assert_allclose(found, [1 - 5 * mean / np.linalg.norm(mean)] * 2, rtol=1e-6)


def test_back_is_towards_the_first_values() -> None:
    back = lie(BACK, 2.0)
    assert handed_in(back)["w"].tolist() == [1.0 - 6.0, 1.0 - 8.0], "in the first round as a flip"
    moved = {"w": torch.tensor([1.0, 7.0]), "count": torch.tensor(3)}
    trained = {"w": torch.tensor([4.0, 11.0]), "count": torch.tensor(3)}
    assert handed_in(back, "mal", 2, moved, trained)["w"].tolist() == [1.0, 7.0 - 10.0]


def test_a_drift_has_one_direction_and_a_random_lie_a_new_one_each_time() -> None:
    for kind, same in ((DRIFT, True), (RANDOM, False)):
        of = lie(kind, 3.0)
        changes = [handed_in(of, name, round_)["w"] - SERVED["w"] for name, round_ in (("eve", 1), ("mal", 1), ("eve", 2))]
        assert [float(change.norm()) for change in changes] == pytest.approx([15.0] * 3)
        assert [torch.allclose(change, changes[0]) for change in changes[1:]] == [same, same]


def test_a_claimed_number_of_samples_reaches_the_mean() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(30) % 3
    x = (rng.normal(size=(30, 6)) + 3 * np.eye(3, 6)[y]).astype(np.float32)
    data = Data("drawn", 3, {f"device{n}": (x, y, x, y) for n in range(5)})
    of = data.attackers(0.2)

    def accuracy(attack: Attack) -> float:
        return run(data, "fedavg", {}, attack, 2, 0)["device0"]

    assert accuracy(Lie(CLAIM, of, 5, 1.0)) < accuracy(Lie(FLIP, of, 5, 1.0)) - 0.3


def key(attack: str, size: str, **more: str) -> tuple[str, ...]:
    usual = USUAL | {"split": UNLIKE[0], "rule": "default", "share": "0.2", "seed": "0", "attack": attack, "size": size} | more
    return tuple(usual[name] for name in KEY)


def test_the_costliest_lie_of_each_rule_and_share_with_seed_0() -> None:
    rows = {
        key(FLIP, "1"): 5.0, key(FLIP, "2"): 7.0, key(CLAIM, "1"): 80.0, key(BACK, "2", seed="1"): 70.0,
        key("none", "0", share="0.0"): 90.0, key(BACK, "2", share="0.3"): 9.0, key(BACK, "1", rule="median"): 1.0,
    }  # fmt: skip
    assert worst(rows) == {key(FLIP, "2"), key(BACK, "2", share="0.3"), key(BACK, "1", rule="median")}


def test_the_server_names_what_liars_cost() -> None:
    """Compare the words at the server's start with the rows: FedAvg, 20 devices, the costliest lie, mean of five seeds."""
    rows = read_rows("liars.csv")
    for share, points in COSTS.items():
        found = costs(rows, **USUAL, split=UNLIKE[0], rule="default", share=str(share))
        assert found is not None and points == round(found[0])
