"""A model in the user's own code, which this device must allow, and the model that all devices of a plan have in common."""

import gc
import sys
import types
from threading import Thread

import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.fedclient.work import baselines
from attune.fedclient.work.baselines import SharedModel, shared_model
from tests.fedclient.work.test_learner import CPU


def plan(seed: int = 0, model: str = "mlr") -> Plan:
    return Plan("f", seed, default_spec("tabular", (4,), 3, 0, model, {}), [0, 1, 2], "fedavg", {}, TrainSettings())


def test_devices_of_a_plan_share_a_built_in_model_and_others_have_another() -> None:
    first = shared_model(plan(), CPU)
    assert shared_model(plan(), CPU) is first and shared_model(plan(seed=1), CPU) is not first
    drawn = tensors_of(build(plan().model, 0))
    assert list(first.initial) == list(drawn) == list(first.part_of)
    assert all(torch.equal(first.initial[name], tensor) for name, tensor in drawn.items())


def test_code_of_a_user_is_called_for_each_device() -> None:
    made = [shared_model(plan(model="tests.fedclient.work.test_shared_model:small"), CPU) for _ in range(2)]
    assert made[0].network is not made[1].network


def test_another_thread_computes_with_a_model_of_its_own() -> None:
    first, others = shared_model(plan(), CPU), list[SharedModel]()
    thread = Thread(target=lambda: others.append(shared_model(plan(), CPU)))
    thread.start()
    thread.join()
    assert others[0].network.model is not first.network.model


def test_a_model_goes_with_its_last_device() -> None:
    gc.collect()
    before = len(baselines._SHARED)
    kept = shared_model(plan(seed=7), CPU)
    assert len(baselines._SHARED) == before + 1
    del kept
    gc.collect()
    assert len(baselines._SHARED) == before


def small(spec: object) -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


@pytest.fixture
def own_model(monkeypatch):
    module = types.ModuleType("field_models")
    built = []

    def factory(spec):
        built.append(spec)
        return torch.nn.Linear(spec.shape[0], spec.classes)

    module.factory = factory
    monkeypatch.setitem(sys.modules, "field_models", module)
    return built


def test_code_of_the_federation_runs_only_where_it_is_allowed(make_bench, own_model):
    bench = make_bench(model="field_models:factory")
    with pytest.raises(SettingError, match="--allow-model field_models:factory"):
        bench.run()
    by_the_server = len(own_model)
    assert not (bench.folder / "home" / "plan.json").exists(), "a plan that was refused binds nothing"
    folder = bench.run(token=None, allow_models=("field_models:factory",))
    assert len(own_model) > by_the_server
    assert (folder / "model.json").exists()
