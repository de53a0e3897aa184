"""A model in the user's own code: never built unless this device allows it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from attune.common.errors import SettingError


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
