"""Aggregators on another processor than the CPU, with torch's fake tensors: this finds mixed devices without a GPU.

A fake tensor has a shape and a device, but no numbers. The numbers are tested on the CPU by all other tests.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attune.common.errors import SettingError
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AmpSettings, AttentionSettings, HeurAmpSettings, HypernetworkSettings
from attune.fedserver.lab import accelerator
from attune.fedserver.lab.aggregators.attention import Amp, HeurAmp, Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork, _HeadRound
from attune.fedserver.lab.aggregators.votes import gram, mix_

GPU = torch.device("cuda", 0)
PARTS = {"a": ["a"], "b": ["b"]}


@pytest.fixture
def on_gpu(monkeypatch):
    """Make new aggregators compute on a GPU that does not exist."""
    monkeypatch.setattr(accelerator, "_used", GPU)
    with FakeTensorMode():
        yield


def updates(count: int = 3) -> list[PartUpdate]:
    return [PartUpdate(f"c{index}", 1 + index, {"a": torch.randn(5, 2), "b": torch.randn(7)}) for index in range(count)]


def devices(tensors) -> set[str]:
    return {tensor.device.type for tensor in tensors}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("from_first", [False, True])
def test_inner_products_and_mixing_stay_where_the_cohort_is(on_gpu, exact, from_first):
    X_SD = torch.randn(3, 70_000).to(GPU)
    assert gram(X_SD, exact, from_first).device == GPU
    mix_(X_SD, torch.eye(3, dtype=torch.float64))


def test_a_mixture_on_two_processors_would_be_found(on_gpu):
    with pytest.raises(RuntimeError, match="device"):
        torch.mm(torch.randn(3, 3), torch.randn(3, 4).to(GPU))


@pytest.mark.parametrize(
    ("made", "settings"), [(Mcsa, AttentionSettings()), (HeurAmp, HeurAmpSettings()), (Amp, AmpSettings(sigma=1.0))]
)
def test_a_mixed_cohort_comes_back_from_the_gpu(on_gpu, made, settings):
    aggregator, cohort, mixed = made(settings, MemoryVault(), 0, PARTS), updates(), []
    for groups in aggregator._units.values():
        A_SS = aggregator._mix(groups, cohort, lambda name, values: mixed.extend(values))
        assert A_SS.device.type == "cpu", "weights are made where the round is held"
    assert devices(mixed) == {"cpu"} and len(mixed) == 2 * len(cohort)
    assert aggregator._device == GPU


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_a_hypernetworks_heads_lie_and_step_on_the_gpu_and_all_else_on_the_cpu(monkeypatch, optimiser):
    settings = HypernetworkSettings(server_optimiser=optimiser, hidden=6)
    monkeypatch.setattr(accelerator, "_used", GPU)
    made, cohort = Hypernetwork(settings, MemoryVault(), 0, PARTS), updates()
    monkeypatch.setattr(accelerator, "_used", torch.device("cpu"))
    whole = Hypernetwork(settings, MemoryVault(), 0, PARTS)
    whole.start({"a": torch.randn(5, 2), "b": torch.randn(7)})
    state = whole._load()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = {name: mode.from_tensor(tensor) for name, tensor in state.network.items()}
        state.network = {name: made._placed(name, tensor) for name, tensor in faked.items()}
        made._state = state
        made._begin_moments(state)
        state.step = 1
        assert {name for name, tensor in state.network.items() if tensor.device == GPU} == {
            name for name in state.network if name.startswith("head.")
        }
        slope = torch.zeros(3, 6, device=GPU)
        gathered = _HeadRound(torch.randn(3, 6).to(GPU), slope, torch.zeros((), dtype=torch.float64, device=GPU))
        made._descend_heads(cohort, gathered, phi=True)
        assert devices([gathered.slope, gathered.square]) == {"cuda"}
        generated = made._generated(state, torch.randn(2, settings.embedding_dim))
        assert len(generated) == 2 and devices(tensor for each in generated for tensor in each.values()) == {"cpu"}


def test_a_processor_that_is_not_there_is_named():
    with pytest.raises(SettingError, match=r"server\.device cuda:99: this machine shows \d+ CUDA devices"):
        accelerator.use("cuda:99")
    assert accelerator.used() == torch.device("cpu")


def test_mps_has_no_float64_for_the_sums_of_aggregators(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.use("auto") == torch.device("cpu")
    with pytest.raises(SettingError, match=r"server\.device mps: it has no float64"):
        accelerator.use("mps")


def test_a_gpu_multiplies_in_few_calls(on_gpu, monkeypatch):
    """Each call costs a GPU some microseconds, however few numbers it has."""
    products, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: products.append(args[0].dtype) or product(*args, **options))
    X_SD = torch.randn(3, 1_000_000).to(GPU)
    gram(X_SD)
    mix_(X_SD, torch.eye(3, dtype=torch.float64))
    assert products == [torch.float64, torch.float32]
