"""Matrices of attention: the recorded weights are those that were used, with the clients' names, within a limit of size."""

import math

import numpy as np
import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings
from attune.fedserver.lab.aggregators import mixing
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mixing import Matrices
from attune.fedserver.lab.aggregators.stored import MATRICES, read_matrices


def uniform(clients):
    return torch.full((clients, clients), 1 / clients, dtype=torch.float64)


def read_back(vault):
    return read_matrices({name: tensor.numpy() for name, tensor in vault.read(MATRICES).items()})


def kept(clients, units):
    vault = MemoryVault()
    collected = Matrices([f"c{i}" for i in range(clients)], units)
    for unit in range(units):
        collected.add(f"unit{unit}", uniform(clients))
    collected.write(vault)
    return read_back(vault)


def test_a_round_keeps_each_components_attention_by_name():
    """Test two clients at a right angle in one component, alike in the other; sigma = 1: e^1 against e^0, and halves."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(sigma=1.0), vault, 0, {"one": ["x"], "two": ["y"]})
    aggregator.start({"x": torch.zeros(2), "y": torch.zeros(1)})
    values = {"b": ([0.0, 3.0], [2.0]), "a": ([5.0, 0.0], [1.0])}
    aggregator.close_round(
        [PartUpdate(name, 1.0, {"x": torch.tensor(x), "y": torch.tensor(y)}) for name, (x, y) in values.items()]
    )
    names, found = read_back(vault)
    own = math.e / (math.e + 1)
    one, two = [[own, 1 - own], [1 - own, own]], [[0.5, 0.5], [0.5, 0.5]]
    mean = [[(own + 0.5) / 2, (1.5 - own) / 2], [(1.5 - own) / 2, (own + 0.5) / 2]]
    assert names == ["a", "b"]
    for key, expected in {"one": one, "two": two, "mean": mean}.items():
        assert np.allclose(found[key], expected, rtol=0, atol=1e-7)
    assert list(found) == ["mean", "one", "two"]


def test_the_last_round_takes_the_place_of_the_one_before():
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(), vault, 0, {"one": ["x"]})
    aggregator.start({"x": torch.zeros(2)})
    for cohort in (("a", "b"), ("c",)):
        aggregator.close_round([PartUpdate(name, 1.0, {"x": torch.ones(2)}) for name in cohort])
    names, found = read_back(vault)
    assert (names, found["one"].tolist()) == (["c"], [[1.0]])
    assert Mcsa(AttentionSettings(), vault, 0, {"one": ["x"]}).slot("matrices") == "cold-start", "it is nobody's value"


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [(4 * 9 * 3, ["mean", "unit0", "unit1"]), (4 * 9 * 3 - 1, ["mean"]), (4 * 9, ["mean"]), (4 * 9 - 1, [])],
)
def test_beyond_the_limit_only_the_mean_or_nothing_is_kept(monkeypatch, limit_bytes, expected):
    monkeypatch.setattr(mixing, "LIMIT_BYTES", limit_bytes)
    names, found = kept(3, 2)
    assert names == ["c0", "c1", "c2"]
    assert list(found) == expected
    assert all(A_SS.sum(axis=1).tolist() == pytest.approx([1.0] * 3) for A_SS in found.values())
