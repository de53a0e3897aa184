"""The server's optimisers for shared parts against numbers worked out by hand and against float64."""

import numpy as np
import pytest
import torch

from attune.common.errors import SettingError
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import MeanSettings
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import Mean

NAMES = ("momentum", "adam", "yogi", "adagrad")


def rounds_of(settings, means, start=0.0, dtype=torch.float32):
    """Return the value after each round; a round has two updates whose weighted mean is the given one."""
    vault = MemoryVault()
    aggregator = Mean(settings, vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.full((1,), start, dtype=dtype)})
    values = []
    for mean in means:
        updates = [PartUpdate("a", 1, {"x": torch.tensor([mean + 3.0], dtype=dtype)})]
        updates += [PartUpdate("b", 3, {"x": torch.tensor([mean - 1.0], dtype=dtype)})]
        aggregator.close_round(updates)
        values.append(vault.read("value")["x"].item())
    return values, vault


def test_momentum_by_hand():
    """Delta = 1: m = 1, x = 1. delta = 0: m = 0.9, x = 1.9. delta = 1.1: m = 1.91, x = 3.81."""
    values, _ = rounds_of(MeanSettings(shared_optimiser="momentum"), [1.0, 1.0, 3.0])
    assert values == pytest.approx([1.0, 1.9, 3.81])


def test_adagrad_by_hand():
    """V = 1e-6 + 4, then + 1: x = 0.5 * 2 / (sqrt(4.000001) + 0.001), then + 0.5 / (sqrt(v) + 0.001) * delta."""
    values, _ = rounds_of(MeanSettings(shared_optimiser="adagrad", shared_lr=0.5), [2.0, 2.0])
    first = 0.5 * 2 / (4.000001**0.5 + 0.001)
    delta = 2 - first
    assert values == pytest.approx([first, first + 0.5 * delta / ((4.000001 + delta**2) ** 0.5 + 0.001)], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ten_rounds_agree_with_an_independent_calculation(name):
    means = np.random.default_rng(5).normal(size=10)
    settings = MeanSettings(shared_optimiser=name, shared_lr=0.2, shared_momentum=0.8, shared_beta2=0.9, shared_adaptivity=0.05)
    values, _ = rounds_of(settings, means.tolist(), start=0.5, dtype=torch.float64)
    x, m, v = 0.5, 0.0, 0.05**2
    for at, mean in enumerate(means):
        d = mean - x
        if name == "momentum":
            m = 0.8 * m + d
            x += 0.2 * m
        else:
            m = 0.8 * m + 0.2 * d
            if name == "adagrad":
                v += d * d
            elif name == "adam":
                v = 0.9 * v + 0.1 * d * d
            else:
                v -= 0.1 * d * d * (1 if v > d * d else -1)
            x += 0.2 * m / (v**0.5 + 0.05)
        assert values[at] == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_integers_take_the_mean_and_half_precision_has_moments_in_float32(name):
    vault = MemoryVault()
    aggregator = Mean(MeanSettings(shared_optimiser=name), vault, 0, {"x": ["n", "w"]})
    aggregator.start({"n": torch.tensor(4), "w": torch.zeros(2, dtype=torch.bfloat16)})
    tiny = torch.full((2,), 1e-3, dtype=torch.bfloat16)
    aggregator.close_round([PartUpdate("a", 1, {"n": torch.tensor(10), "w": tiny})])
    assert vault.read("value")["n"].item() == 10 and vault.read("value")["w"].dtype == torch.bfloat16
    assert list(vault.read("first-moment")) == ["w"] and vault.read("first-moment")["w"].dtype == torch.float32


def test_a_round_without_a_counting_update_changes_nothing():
    _, vault = rounds_of(MeanSettings(shared_optimiser="adam"), [1.0])
    before = {key: vault.read(key)["x"].clone() for key in list(vault.keys())}
    aggregator = Mean(MeanSettings(shared_optimiser="adam"), vault, 0, {"x": ["x"]})
    aggregator.close_round([PartUpdate("a", 0, {"x": torch.ones(1)})])
    assert all(torch.equal(before[key], vault.read(key)["x"]) for key in before)


def test_two_settings_of_one_step_are_refused():
    with pytest.raises(SettingError, match=r"server_mix = 0\.5 and method.shared_optimiser"):
        MeanSettings(shared_optimiser="adam", server_mix=0.5)
